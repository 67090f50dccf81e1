#include "client/engines/llama/dropped_rows.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "client/engines/llama/log.h"
#include "pqcached/load.h"

namespace pqcached::llama {
namespace {

constexpr size_t kFilledPages = 64;  // together
constexpr auto kFetchPause = std::chrono::milliseconds(2);

size_t PageBytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Returns the first page's beginning at an address or behind it.
std::byte* RoundUp(std::byte* address) {
  const size_t over = reinterpret_cast<uintptr_t>(address) % PageBytes();
  return over == 0 ? address : address + (PageBytes() - over);
}

std::string SystemError(const char* call) {
  return std::string(call) + ": " + std::strerror(errno);
}

}  // namespace

DroppedRows::DroppedRows(const Layers& layers, uint32_t cells, Sidecar* sidecar,
                         std::chrono::milliseconds deadline)
    : layers_(layers),
      sidecar_(sidecar),
      deadline_(deadline),
      row_bytes_(layers.shape.cell_bytes),
      cells_(cells),
      lost_(cells),
      away_((cells + 63) / 64),
      prints_(cells) {}

std::unique_ptr<DroppedRows> DroppedRows::Open(const Layers& layers, uint32_t cells,
                                               Sidecar* sidecar, std::chrono::milliseconds deadline,
                                               std::string* problem) {
  const Attention& shape = layers.shape;
  const size_t element = kernels::DTypeBytes(shape.dtype);
  if (shape.cell_bytes != shape.kv_heads * shape.key_dim * element ||
      shape.cell_bytes != shape.kv_heads * shape.value_dim * element) {
    *problem = "keys and values of different sizes";
    return nullptr;
  }
  std::unique_ptr<DroppedRows> rows(new DroppedRows(layers, cells, sidecar, deadline));
  // A page fault must not fail because memory is short.
  const size_t buffer = kFilledPages * PageBytes() + 2 * shape.cell_bytes;
  rows->rows_.reserve(buffer);
  rows->other_rows_.reserve(buffer);
  *problem = rows->Register();
  if (!problem->empty()) return nullptr;
  rows->thread_ = std::thread([own = rows.get()] { own->Run(); });
  return rows;
}

DroppedRows::~DroppedRows() {
  if (thread_.joinable()) {
    [[maybe_unused]] const ssize_t written = write(stop_[1], "", 1);
    thread_.join();
  }
  for (const Array& array : arrays_) {
    if (array.page_count == 0) continue;
    // Closing the descriptor does not do this while a forked process has it, too.
    uffdio_range range{reinterpret_cast<uintptr_t>(array.pages), array.page_count * PageBytes()};
    ioctl(faults_, UFFDIO_UNREGISTER, &range);
    madvise(array.pages, array.page_count * PageBytes(), MADV_DOFORK);
  }
  for (const int each : {faults_, stop_[0], stop_[1]}) {
    if (each >= 0) close(each);
  }
}

// Asks for the page faults of all arrays. Returns what is not possible, or an empty text.
std::string DroppedRows::Register() {
  faults_ =
      static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY));
  if (faults_ < 0) return SystemError("userfaultfd");
  uffdio_api api{};
  api.api = UFFD_API;
  if (ioctl(faults_, UFFDIO_API, &api) != 0) return SystemError("UFFDIO_API");
  if (pipe2(stop_, O_CLOEXEC) != 0) return SystemError("pipe");
  const auto bytes = row_bytes_ * cells_.size();
  for (uint32_t layer = 0; layer < layers_.arrays.size(); ++layer) {
    for (const bool has_values : {false, true}) {
      const LayerArrays& arrays = layers_.arrays[layer];
      auto* const begin = const_cast<std::byte*>(has_values ? arrays.values : arrays.keys);
      std::byte* const pages = RoundUp(begin);
      const size_t count =
          begin + bytes <= pages ? 0 : static_cast<size_t>(begin + bytes - pages) / PageBytes();
      arrays_.push_back(
          {begin, pages, count, layer, has_values, std::vector<uint64_t>(count / 64 + 1, 0)});
      if (count == 0) continue;
      uffdio_register range{};
      range.range = {reinterpret_cast<uintptr_t>(pages), count * PageBytes()};
      range.mode = UFFDIO_REGISTER_MODE_MISSING;
      if (ioctl(faults_, UFFDIO_REGISTER, &range) != 0) return SystemError("UFFDIO_REGISTER");
      // The page faults of a forked process would find zeros.
      if (madvise(pages, range.range.len, MADV_DONTFORK) != 0) return SystemError("MADV_DONTFORK");
    }
  }
  return "";
}

void DroppedRows::Run() {
  for (;;) {
    pollfd events[] = {{faults_, POLLIN, 0}, {stop_[0], POLLIN, 0}};
    if (poll(events, 2, -1) < 0 && errno != EINTR) return;
    if (events[1].revents != 0) return;
    uffd_msg message;
    if (read(faults_, &message, sizeof(message)) != sizeof(message)) continue;
    if (message.event != UFFD_EVENT_PAGEFAULT) continue;
    Serve(static_cast<uintptr_t>(message.arg.pagefault.address),
          (message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WRITE) != 0);
  }
}

void DroppedRows::Serve(uintptr_t address, bool is_write) {
  const std::lock_guard lock(mutex_);
  const Deadline deadline = std::chrono::steady_clock::now() + deadline_;
  for (Array& array : arrays_) {
    const auto begin = reinterpret_cast<uintptr_t>(array.pages);
    if (address < begin || address >= begin + array.page_count * PageBytes()) continue;
    const size_t page = (address - begin) / PageBytes();
    try {
      if (FillPages(&array, page, kFilledPages, false, deadline) == Fill::kDone) return;
      if (FillPages(&array, page, 1, false, deadline) == Fill::kDone) return;
      // A write needs no other rows of its page.
      if (is_write) LoseRows(array, page);
      if (is_write && FillPages(&array, page, 1, true, deadline) == Fill::kDone) return;
    } catch (const std::exception&) {
    }
    Log("ends the process: rows that were given back cannot be read from the sidecar any more");
    std::abort();
  }
}

bool DroppedRows::IsMissing(const Array& array, size_t page) {
  return (array.missing[page / 64] >> page % 64 & 1) != 0;
}

void DroppedRows::SetMissing(Array* array, size_t page, bool is_missing) {
  const uint64_t bit = uint64_t{1} << page % 64;
  if (is_missing) {
    array->missing[page / 64] |= bit;
  } else {
    array->missing[page / 64] &= ~bit;
  }
  if (array != &arrays_[arrays_.size() - 2]) return;  // the keys of the last layer
  const auto begin = static_cast<size_t>(array->pages - array->begin) + page * PageBytes();
  for (size_t cell = (begin + row_bytes_ - 1) / row_bytes_; cell * row_bytes_ < begin + PageBytes();
       ++cell) {
    const uint64_t own = uint64_t{1} << cell % 64;
    if (is_missing) {
      away_[cell / 64].fetch_or(own, std::memory_order_release);
    } else {
      away_[cell / 64].fetch_and(~own, std::memory_order_release);
    }
  }
}

uint32_t DroppedRows::OwnerOf(StoredHistory* stored) {
  const auto found = std::find(owners_.begin(), owners_.end(), stored);
  if (found != owners_.end()) return static_cast<uint32_t>(found - owners_.begin());
  owners_.push_back(stored);
  return static_cast<uint32_t>(owners_.size()) - 1;
}

// Notes that the rows on a page are lost.
void DroppedRows::LoseRows(const Array& array, size_t page) {
  const auto offset = static_cast<size_t>(array.pages - array.begin) + page * PageBytes();
  const size_t last = (offset + PageBytes() - 1) / row_bytes_;
  for (size_t cell = offset / row_bytes_; cell <= last; ++cell) {
    if (cells_[cell].owner >= kLost) continue;
    cells_[cell].owner = kLost;
    lost_.Add(static_cast<uint32_t>(cell));
    has_lost_ = true;
    ++losses_;
  }
}

void DroppedRows::Drop(const std::shared_ptr<History>& history, uint32_t begin, uint32_t end,
                       StoredHistory* stored) {
  const std::lock_guard lock(mutex_);
  const uint32_t owner = OwnerOf(stored);
  for (uint32_t i = begin; i < end; ++i) {
    // Rows that are away for another history remain so: it has fetched none of them since.
    if (HasMissingPages(history->cells[i])) continue;
    cells_[history->cells[i]] = {owner, i};
    prints_[history->cells[i]].store(history->prints[i], std::memory_order_relaxed);
  }
  for (uint32_t i = begin; i < end;) {
    uint32_t last = i;
    while (last + 1 < end && history->cells[last + 1] == history->cells[last] + 1) ++last;
    for (Array& array : arrays_) GiveBack(&array, owner, history->cells[i], history->cells[last]);
    i = last + 1;
  }
  if (!history->has_offloaded()) history->offloaded_begin = begin;
  history->offloaded_end = end;
}

// Returns whether all rows on a page are dropped ones of an owner. Those of others may be out of
// date: the application may have removed a sequence and loaded another one, which no graph shows.
bool DroppedRows::IsDropped(const Array& array, uint32_t owner, size_t page) const {
  const auto offset = static_cast<size_t>(array.pages - array.begin) + page * PageBytes();
  const size_t last = (offset + PageBytes() - 1) / row_bytes_;
  for (size_t cell = offset / row_bytes_; cell <= last; ++cell) {
    if (cells_[cell].owner != owner) return false;
  }
  return true;
}

// Gives back the pages that have rows of these cells, and only dropped ones of the owner.
void DroppedRows::GiveBack(Array* array, uint32_t owner, uint32_t first_cell, uint32_t last_cell) {
  const auto skipped = static_cast<size_t>(array->pages - array->begin);
  const size_t begin = std::max(skipped, first_cell * row_bytes_) - skipped;
  const size_t end = std::max(skipped, (size_t{last_cell} + 1) * row_bytes_) - skipped;
  const size_t last = std::min(array->page_count, (end + PageBytes() - 1) / PageBytes());
  size_t run = 0;
  for (size_t page = begin / PageBytes(); page <= last; ++page) {
    if (page < last && !IsMissing(*array, page) && IsDropped(*array, owner, page)) {
      SetMissing(array, page, true);
      ++run;
      continue;
    }
    if (run == 0) continue;
    std::byte* const first = array->pages + (page - run) * PageBytes();
    if (madvise(first, run * PageBytes(), MADV_DONTNEED) == 0) {
      given_back_bytes_ += run * PageBytes();
    } else {
      // Some pages may be gone all the same.
      for (size_t i = 0; i < run; ++i) {
        if (madvise(first + i * PageBytes(), PageBytes(), MADV_DONTNEED) == 0) {
          given_back_bytes_ += PageBytes();
        } else {
          SetMissing(array, page - run + i, false);
        }
      }
    }
    run = 0;
  }
}

// Fills up to `count` pages from `page` on that are missing, with the lock. Rows of free cells
// become 0. `fills_lost`: lost ones become NaN.
DroppedRows::Fill DroppedRows::FillPages(Array* array, size_t page, size_t count, bool fills_lost,
                                         Deadline deadline) {
  size_t end = page;
  while (end < std::min(array->page_count, page + count) &&
         (end == page || (IsMissing(*array, page) && IsMissing(*array, end)))) {
    ++end;
  }
  const auto skipped = static_cast<size_t>(array->pages - array->begin);
  const size_t first_byte = skipped + page * PageBytes();
  const auto first = static_cast<uint32_t>(first_byte / row_bytes_);
  const auto last = static_cast<uint32_t>((skipped + end * PageBytes() - 1) / row_bytes_);
  rows_.assign((size_t{last} - first + 1) * row_bytes_, std::byte{0});
  const bool was_given_back = IsMissing(*array, page);  // else it was never written: zeros
  for (uint32_t cell = first; cell <= last && was_given_back;) {
    const Cell& own = cells_[cell];
    if (own.owner == kLost && !fills_lost) return Fill::kLost;
    if (own.owner == kLost) {
      std::fill_n(rows_.begin() + static_cast<ptrdiff_t>((cell - first) * row_bytes_), row_bytes_,
                  std::byte{0xff});
    }
    uint32_t next = cell + 1;
    while (next <= last && cells_[next].owner == own.owner && own.owner < kLost &&
           cells_[next].token == own.token + (next - cell)) {
      ++next;
    }
    if (own.owner < kLost &&
        !Fetch(*array, cell, next, rows_.data() + size_t{cell - first} * row_bytes_, deadline)) {
      return Fill::kFailed;
    }
    cell = next;
  }
  const std::byte* const from = rows_.data() + (first_byte - size_t{first} * row_bytes_);
  for (size_t each = page; each < end; ++each) {
    if (!CopyPage(array->pages + each * PageBytes(), from + (each - page) * PageBytes())) {
      return Fill::kFailed;
    }
    SetMissing(array, each, false);
    fetched_bytes_ += PageBytes();
  }
  return Fill::kDone;
}

// Fills a page, and wakes the threads that wait for it. Returns false when memory is short.
bool DroppedRows::CopyPage(std::byte* to, const std::byte* from) const {
  uffdio_copy copy{};
  copy.dst = reinterpret_cast<uintptr_t>(to);
  copy.src = reinterpret_cast<uintptr_t>(from);
  copy.len = PageBytes();
  while (ioctl(faults_, UFFDIO_COPY, &copy) != 0) {
    if (errno == EAGAIN) continue;
    if (errno != EEXIST) return false;
    uffdio_range range{copy.dst, copy.len};  // it is there
    ioctl(faults_, UFFDIO_WAKE, &range);
    return true;
  }
  return true;
}

// Fills the pages that a cell's rows lie on.
DroppedRows::Fill DroppedRows::FillMissing(uint32_t cell, Deadline deadline) {
  Fill fill = Fill::kDone;
  for (Array& array : arrays_) {
    ForPages(&array, cell, [&](size_t page) {
      if (fill != Fill::kDone || !IsMissing(array, page)) return;
      fill = FillPages(&array, page, kFilledPages, false, deadline);
      if (fill != Fill::kDone) fill = FillPages(&array, page, 1, false, deadline);
    });
  }
  return fill;
}

// Fetches the rows of cells [begin, end), which are consecutive tokens of one owner.
bool DroppedRows::Fetch(const Array& array, uint32_t begin, uint32_t end, std::byte* to,
                        Deadline deadline) {
  const Attention& shape = layers_.shape;
  const StoredHistory& stored = *owners_[cells_[begin].owner];
  const uint32_t token = cells_[begin].token, count = end - begin;
  other_rows_.resize(size_t{count} * row_bytes_);
  const uint64_t dims[] = {count, shape.kv_heads, shape.key_dim};
  const auto tensor = [&](std::byte* memory) {
    pqc_tensor each = PQC_INIT(pqc_tensor);
    each.ptr = memory;
    each.dtype = PqcDType(shape.dtype);
    each.ndim = 3;
    each.shape = dims;
    return each;
  };
  pqc_layer_rows rows = PQC_INIT(pqc_layer_rows);
  rows.layer = array.layer;
  rows.keys = tensor(array.has_values ? other_rows_.data() : to);
  rows.values = tensor(array.has_values ? to : other_rows_.data());
  for (;;) {
    pqc_sequence* const sequence = sidecar_->BeginReading(stored);
    const pqc_status status = sequence == nullptr
                                  ? PQC_UNAVAILABLE
                                  : pqc_load(sequence, {token, token + count}, &rows, 1);
    sidecar_->EndReading();
    if (status == PQC_OK) return true;
    if (sidecar_->IsLost(stored) || std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kFetchPause);
  }
}

// Calls work(page) for the pages that a cell's row lies on.
template <class Work>
void DroppedRows::ForPages(Array* array, uint32_t cell, Work work) {
  const auto skipped = static_cast<size_t>(array->pages - array->begin);
  const size_t end = (size_t{cell} + 1) * row_bytes_;
  if (end <= skipped) return;
  size_t page = (std::max(skipped, cell * row_bytes_) - skipped) / PageBytes();
  for (; page < array->page_count && skipped + page * PageBytes() < end; ++page) work(page);
}

bool DroppedRows::HasMissingPages(uint32_t cell) {
  bool has_missing = false;
  for (Array& array : arrays_) {
    ForPages(&array, cell,
             [&](size_t page) { has_missing = has_missing || IsMissing(array, page); });
  }
  return has_missing;
}

void DroppedRows::Return(const History& history, uint32_t keep) {
  const std::lock_guard lock(mutex_);
  const Deadline deadline = std::chrono::steady_clock::now() + deadline_;
  bool is_lost = false;
  const auto is_owned = [&](uint32_t i) {
    const Cell& cell = cells_[history.cells[i]];
    return cell.owner < kLost && owners_[cell.owner]->history.get() == &history;
  };
  const uint32_t begin = std::max(keep, history.offloaded_begin);
  for (uint32_t i = begin; i < history.offloaded_end && !is_lost; ++i) {
    if (is_owned(i)) is_lost = FillMissing(history.cells[i], deadline) != Fill::kDone;
  }
  for (uint32_t i = begin; i < history.offloaded_end; ++i) {
    if (!is_owned(i)) continue;
    const uint32_t cell = history.cells[i];
    const bool loses = is_lost && HasMissingPages(cell);
    cells_[cell].owner = loses ? kLost : kFree;
    if (!loses) continue;
    lost_.Add(cell);
    has_lost_ = true;
    ++losses_;
  }
}

bool DroppedRows::Bring(std::span<const uint32_t> cells) {
  const std::lock_guard lock(mutex_);
  const Deadline deadline = std::chrono::steady_clock::now() + deadline_;
  return std::all_of(cells.begin(), cells.end(),
                     [&](uint32_t cell) { return FillMissing(cell, deadline) == Fill::kDone; });
}

void DroppedRows::FindAway(const CellSet& seen, std::vector<uint32_t>* cells) const {
  cells->clear();
  for (size_t word = 0; word < away_.size(); ++word) {
    uint64_t left = seen.words()[word];
    if (left != 0) left &= away_[word].load(std::memory_order_acquire);
    for (; left != 0; left &= left - 1) {
      cells->push_back(static_cast<uint32_t>(word * 64) +
                       static_cast<uint32_t>(std::countr_zero(left)));
    }
  }
}

void DroppedRows::Write(std::span<const uint32_t> cells) {
  const std::lock_guard lock(mutex_);
  if (!has_lost_) return;
  for (const uint32_t cell : cells) {
    lost_.Remove(cell);
    if (cells_[cell].owner == kLost) cells_[cell].owner = kFree;
  }
  has_lost_ = std::any_of(lost_.words().begin(), lost_.words().end(),
                          [](uint64_t word) { return word != 0; });
}

bool DroppedRows::has_lost() const {
  const std::lock_guard lock(mutex_);
  return has_lost_;
}

bool DroppedRows::SeesLost(const CellSet& seen) const {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; has_lost_ && i < seen.words().size(); ++i) {
    if ((seen.words()[i] & lost_.words()[i]) != 0) return true;
  }
  return false;
}

}  // namespace pqcached::llama

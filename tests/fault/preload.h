// What LD_PRELOAD has to name so that a shim of the tests comes before the C library of a daemon, and the
// files that such shims share with a test.
#ifndef PQCACHED_TESTS_FAULT_PRELOAD_H_
#define PQCACHED_TESTS_FAULT_PRELOAD_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

namespace pqcached::testing {

// A sanitizer wants its runtime before all others: the one that this process runs with.
inline std::string PreloadOf(const std::string& shim) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find('/');
    if (path == std::string::npos) continue;
    if (line.find("clang_rt.asan") != std::string::npos ||
        line.find("libasan.so") != std::string::npos) {
      return line.substr(path) + ":" + shim;
    }
  }
  return shim;
}

// A new file of the size of `Shared`, all zero, that this process maps; shims map it by its path.
template <class Shared>
class SharedFile {
 public:
  explicit SharedFile(std::filesystem::path path) : path_(std::move(path)) {
    std::ofstream(path_).close();
    std::filesystem::resize_file(path_, sizeof(Shared));
    const int file = open(path_.c_str(), O_RDWR | O_CLOEXEC);
    page_ = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
  }
  ~SharedFile() { munmap(page_, sizeof(Shared)); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  Shared& operator*() const { return *static_cast<Shared*>(page_); }
  Shared* operator->() const { return static_cast<Shared*>(page_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  const std::filesystem::path path_;
  void* page_ = nullptr;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_PRELOAD_H_

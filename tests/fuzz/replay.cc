// Runs a fuzz target without a fuzzer.
//
//   PROGRAM [--random COUNT] [PATH...]  runs the seeds, the inputs in the files and folders, and
//                                       COUNT inputs that are made of these by chance, the same ones
//                                       each time. Prints how many it has run per second.
//   PROGRAM --write FOLDER              writes the seeds there, one file each
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/fuzz/target.h"

namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxBytes = 512;

void Run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

std::string Read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "%s cannot be read\n", path.c_str());
    std::exit(1);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> ReadAll(const fs::path& path) {
  if (!fs::is_directory(path)) return {Read(path)};
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(path)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> inputs;
  for (const fs::path& each : paths) inputs.push_back(Read(each));
  return inputs;
}

// The beginning of one input and the end of another one, with some bytes changed.
std::string Mix(const std::vector<std::string>& inputs, std::mt19937& random) {
  const auto below = [&random](size_t count) { return count == 0 ? 0 : random() % count; };
  const std::string& first = inputs[below(inputs.size())];
  const std::string& second = inputs[below(inputs.size())];
  std::string input = first.substr(0, below(first.size() + 1));
  input += second.substr(below(second.size() + 1));
  input.resize(std::min(input.size(), kMaxBytes));
  for (size_t changes = below(5); changes > 0 && !input.empty(); --changes) {
    const size_t place = below(input.size());
    const auto byte = static_cast<char>(random());
    switch (below(3)) {
      case 0:
        input[place] = byte;
        break;
      case 1:
        input.insert(place, 1, byte);
        break;
      default:
        input.erase(place, 1);
    }
  }
  return input;
}

int WriteSeeds(const std::vector<std::string>& seeds, const std::string& folder) {
  for (size_t i = 0; i < seeds.size(); ++i) {
    std::ofstream file(folder + "/seed-" + std::to_string(i), std::ios::binary);
    if (!file.write(seeds[i].data(), static_cast<std::streamsize>(seeds[i].size()))) return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> inputs = pqcached::fuzz::Seeds();
  if (argc == 3 && std::strcmp(argv[1], "--write") == 0) return WriteSeeds(inputs, argv[2]);
  int random_count = 0;
  int i = 1;
  if (argc >= 3 && std::strcmp(argv[1], "--random") == 0) {
    random_count = std::atoi(argv[2]);
    i = 3;
  }
  for (; i < argc; ++i) {
    for (std::string& input : ReadAll(argv[i])) inputs.push_back(std::move(input));
  }
  for (const std::string& input : inputs) Run(input);
  std::printf("%zu inputs\n", inputs.size());
  std::mt19937 random(1);
  const auto begun = std::chrono::steady_clock::now();
  for (int count = 0; count < random_count; ++count) Run(Mix(inputs, random));
  if (random_count > 0) {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begun;
    std::printf("%d more by chance, %.0f per second\n", random_count, random_count / taken.count());
  }
  return 0;
}

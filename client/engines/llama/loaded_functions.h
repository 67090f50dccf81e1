// Functions of llama.cpp and ggml, which are found by name in the process: nothing here is built or
// linked against them.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_LOADED_FUNCTIONS_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_LOADED_FUNCTIONS_H_

#include <string>
#include <string_view>
#include <vector>

namespace pqcached::llama {

class LoadedFunctions {
 public:
  // Searches the program, and all loaded libraries whose file names begin with `prefix`. Programs
  // that load llama.cpp with RTLD_LOCAL, as Python's ctypes does, hide its functions from a search
  // without a handle.
  explicit LoadedFunctions(std::string_view prefix);

  // Sets *function to the address of `name`, and remembers the first name that is missing.
  template <class Function>
  void Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(Address(name));
  }
  // "" while all were found.
  const std::string& missing() const { return missing_; }

 private:
  void* Address(const char* name);

  std::vector<void*> libraries_;  // never closed: they are loaded for as long as this library is
  std::string missing_;
};

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_LOADED_FUNCTIONS_H_

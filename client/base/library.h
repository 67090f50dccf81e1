// Loads a library of this project that the client does not link, so that engines do not need its
// dependencies.
#ifndef PQCACHED_CLIENT_BASE_LIBRARY_H_
#define PQCACHED_CLIENT_BASE_LIBRARY_H_

#include <string>

namespace pqcached::client {

// Loads `path`; when it is null, `file_name` from the directory of this library, then from the
// loader's search path. Returns null, with the loader's reasons in *reasons, when it cannot be
// loaded. `mode` is dlopen's.
void* LoadLibrary(const char* path, const char* file_name, int mode, std::string* reasons);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_LIBRARY_H_

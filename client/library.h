// Loads a library of ours that the client does not link, so that engines need not have what it needs.
#ifndef PQCACHED_CLIENT_LIBRARY_H_
#define PQCACHED_CLIENT_LIBRARY_H_

#include <string>

namespace pqcached::client {

// `path`, or where it is null: `file_name` beside this library, then on the loader's search path. Null, with the
// loader's reasons in *reasons, when it cannot be loaded. `mode` is dlopen's.
void* LoadLibrary(const char* path, const char* file_name, int mode, std::string* reasons);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LIBRARY_H_

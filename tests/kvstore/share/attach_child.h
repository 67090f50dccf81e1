// Code that runs in another process, as another user.
#ifndef PQCACHED_TESTS_KVSTORE_SHARE_ATTACH_CHILD_H_
#define PQCACHED_TESTS_KVSTORE_SHARE_ATTACH_CHILD_H_

#include <grp.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace pqcached::kvstore {

inline constexpr uid_t kInBackground = 65534;

// Runs `body` in a forked child and returns what it returned, or "the child died".
inline std::string InChild(const std::function<std::string()>& body) {
  int ends[2] = {};
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child < 0) return "no fork";
  if (child == 0) {
    close(ends[0]);
    const std::string text = body() + ";";
    const bool written =
        write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || text.empty()) return "the child died";
  text.pop_back();
  return text;
}

// Becomes another user, for good. Its /proc/self/fd stays its own, as it is for a process that was
// started by that user. False when this process may not.
inline bool BecomeNobody() {
  return setgroups(0, nullptr) == 0 && setgid(kInBackground) == 0 && setuid(kInBackground) == 0 &&
         prctl(PR_SET_DUMPABLE, 1) == 0;
}

}  // namespace pqcached::kvstore

#endif  // PQCACHED_TESTS_KVSTORE_SHARE_ATTACH_CHILD_H_

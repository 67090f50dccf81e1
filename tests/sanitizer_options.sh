# Sets the options of the sanitizers for tests. Sourced from the project's root.
# intercept_tls_get_addr=0: in clang 14 the leak sanitizer mistakes some thread-local blocks for those
# of a glibc before 2.25, and dies by signal 11 when a program ends (fixed in LLVM 17).
export LSAN_OPTIONS="suppressions=$PWD/tests/lsan.supp:print_suppressions=0:intercept_tls_get_addr=0"
export UBSAN_OPTIONS=print_stacktrace=1

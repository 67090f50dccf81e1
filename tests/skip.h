// PQC_SKIP ends a test that cannot run here, with the line that skips.py collects:
// PQC_SKIP("root") << "needs another user". The name is one of skips.REQUIREMENTS.
#ifndef PQCACHED_TESTS_SKIP_H_
#define PQCACHED_TESTS_SKIP_H_

#include <gtest/gtest.h>

#define PQC_SKIP(name) GTEST_SKIP() << "SKIPPED " name ": "

#endif  // PQCACHED_TESTS_SKIP_H_

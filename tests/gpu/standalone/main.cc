// Runs the tests of a program that was built without GoogleTest.
#include "gtest/gtest.h"

int main() { return testing::RunAllTests(); }

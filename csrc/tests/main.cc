#include <cstdio>
#include <exception>

#include "tests/harness.h"

std::vector<mok::test::Test>& mok::test::tests() {
  static std::vector<Test> all;
  return all;
}

int main() {
  int passed = 0, failed = 0;
  for (const auto& test : mok::test::tests()) {
    try {
      test.run();
      ++passed;
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s: %s\n", test.name, error.what());
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

// A minimal test harness: TEST(name) { CHECK(condition); }. A test fails at its first failed check.
#ifndef MEGATRON_MOK_TESTS_HARNESS_H_
#define MEGATRON_MOK_TESTS_HARNESS_H_

#include <cstdint>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace mok::test {

struct Test {
  const char* name;
  void (*run)();
};
std::vector<Test>& tests();

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

// Random numbers that are the same on every machine (the standard distributions are not).
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t in(int64_t low, int64_t high) { return low + int64_t(engine_() % uint64_t(high - low + 1)); }
  int64_t of(std::initializer_list<int64_t> values) { return values.begin()[in(0, int64_t(values.size()) - 1)]; }

 private:
  std::mt19937_64 engine_;
};

template <class... Values>
[[noreturn]] void failed(const char* condition, const char* file, int line, Values... values) {
  std::ostringstream text;
  text << file << ":" << line << ": " << condition;
  if constexpr (sizeof...(values) > 0) {
    text << ", got";
    ((text << " " << values), ...);
  }
  throw std::runtime_error(text.str());
}

}  // namespace mok::test

// Further arguments are values to print.
#define CHECK(condition, ...)                                                                        \
  do {                                                                                               \
    if (!(condition)) mok::test::failed(#condition, __FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__); \
  } while (0)
#define TEST(name)                                             \
  static void name();                                          \
  static const mok::test::Register register_##name(#name, name); \
  static void name()

#endif  // MEGATRON_MOK_TESTS_HARNESS_H_

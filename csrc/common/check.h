// RL_CHECK(condition, parts of a sentence...): std::invalid_argument, which Python sees as
// ValueError.
#pragma once

#include <sstream>
#include <stdexcept>

namespace rlcore {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream sentence;
  (sentence << ... << parts);
  throw std::invalid_argument(sentence.str());
}

}  // namespace rlcore

#define RL_CHECK(condition, ...)                     \
  do {                                               \
    if (!(condition)) ::rlcore::refuse(__VA_ARGS__); \
  } while (false)

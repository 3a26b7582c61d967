// What clang-tidy reads before all else (scripts/lint). Under C++20 libstdc++'s vector is constexpr, and clang compiles the members
// of a constexpr class where they are used, not at the end of the file. LibTorch 1.13 has vectors of an element that is complete
// only later (c10::IValue). Here vector loses the constexpr, as g++ treats it; std::string keeps its own.
#pragma once
#include <string>
#undef _GLIBCXX20_CONSTEXPR
#define _GLIBCXX20_CONSTEXPR
#define __fill_a1 __fill_bits_a1  // declared constexpr by <string> already
#include <vector>
#undef __fill_a1
#undef _GLIBCXX20_CONSTEXPR
#define _GLIBCXX20_CONSTEXPR constexpr

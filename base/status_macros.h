// What a function does with an error that is not its own to handle: it returns it.
//
//   RETURN_IF_ERROR(file->Sync());
//   ASSIGN_OR_RETURN(std::unique_ptr<aio::Engine> engine, aio::Engine::Create(options));
//
// Both are for functions that return absl::Status or absl::StatusOr. Internal: no installed header includes
// this.
#ifndef PENSTOCK_BASE_STATUS_MACROS_H_
#define PENSTOCK_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define PENSTOCK_CONCATENATE_(a, b) a##b
#define PENSTOCK_CONCATENATE(a, b) PENSTOCK_CONCATENATE_(a, b)

// Names and declarations cannot stand in parentheses. NOLINTBEGIN(bugprone-macro-parentheses)

// Returns the absl::Status that the expression gives, unless it is OK.
#define RETURN_IF_ERROR(...) \
  PENSTOCK_RETURN_IF_ERROR_(PENSTOCK_CONCATENATE(error_, __COUNTER__), (__VA_ARGS__))
#define PENSTOCK_RETURN_IF_ERROR_(error, expression)                  \
  do {                                                                \
    if (absl::Status error = (expression); !error.ok()) return error; \
  } while (false)

// Gives `to`, a variable or the declaration of one, the value of the absl::StatusOr that the expression
// gives, or returns its error. A type with a comma in it is written as auto. Two statements: it wants braces
// after an if.
#define ASSIGN_OR_RETURN(to, ...) \
  PENSTOCK_ASSIGN_OR_RETURN_(PENSTOCK_CONCATENATE(value_or_, __COUNTER__), to, (__VA_ARGS__))
#define PENSTOCK_ASSIGN_OR_RETURN_(value_or, to, expression) \
  auto value_or = (expression);                              \
  if (!value_or.ok()) return std::move(value_or).status();   \
  to = *std::move(value_or)

// NOLINTEND(bugprone-macro-parentheses)

#endif  // PENSTOCK_BASE_STATUS_MACROS_H_

#include "zero/config/modes.h"

#include "zero/config/mode_names.h"

namespace penstock::zero {

std::string_view Name(OffloadDevice value) { return NameIn(NamesOf(value), value); }
std::string_view Name(Durability value) { return NameIn(NamesOf(value), value); }
std::string_view Name(UpdateOrder value) { return NameIn(NamesOf(value), value); }
std::string_view Name(MissingGradients value) { return NameIn(NamesOf(value), value); }

}  // namespace penstock::zero

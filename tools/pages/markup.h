// Text and numbers on a page, and the page around them.
//
// A page is one HTML file that asks nobody for anything: styles stand in it, pictures are inline SVG, there
// is no script, and a content security policy forbids what somebody might smuggle in.
#ifndef PENSTOCK_TOOLS_PAGES_MARKUP_H_
#define PENSTOCK_TOOLS_PAGES_MARKUP_H_

#include <string>
#include <string_view>
#include <vector>

namespace penstock::tools {

// `text` as it may stand in an element or a quoted attribute: <, >, &, quotes and control characters
// harmless, broken UTF-8 replaced.
std::string Escape(std::string_view text);

// What an axis or a table counts.
enum class Unit { kPlain, kSeconds, kBytes, kBytesPerSecond, kCount };
// With its unit, in few digits; "-" for what is not finite.
std::string Format(double value, Unit unit);
// In `digits` digits, without an exponent for what people count.
std::string Plain(double value, int digits);
// As Format, for the ticks of an axis that ends at `largest`: all of them in one unit.
std::string FormatTick(double value, double largest, Unit unit);

// Columns and rows of texts, which it escapes; the first column heads its row. `caption` may be empty.
std::string Table(std::string_view caption, const std::vector<std::string>& columns,
                  const std::vector<std::vector<std::string>>& rows);

// A closed <details> with a table: what a picture shows, as numbers.
std::string Numbers(const std::string& table);

// A section with a heading; `body` is HTML. `lead`, if any, is a sentence under the heading.
std::string Section(std::string_view heading, std::string_view lead, const std::string& body);

// Figures side by side where there is room, else one under the other.
std::string Grid(const std::vector<std::string>& figures);

// The whole file. `lead` is text, `body` HTML.
std::string Page(std::string_view title, std::string_view lead, const std::string& body);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_MARKUP_H_

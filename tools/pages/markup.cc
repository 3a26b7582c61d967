#include "tools/pages/markup.h"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/base/size.h"
#include "tools/base/version.h"

namespace penstock::tools {
namespace {

// Series have a colour and a dash or a letter: nothing is told by colour alone.
constexpr std::string_view kStyle = R"(
:root{color-scheme:light dark;--bg:#fff;--card:#f6f7f9;--fg:#1b1f24;--dim:#57606a;--line:#d5dae0;
--c0:#0b62c4;--c1:#b4480a;--c2:#1a7f37;--c3:#8a3fb5;--c4:#9a6700;--c5:#c11f52;--c6:#0d7d84;--c7:#5f6872}
@media(prefers-color-scheme:dark){:root{--bg:#0f1318;--card:#181d24;--fg:#e8ecf1;--dim:#a3adb8;--line:#353d48;
--c0:#6cb0ff;--c1:#ff9b5e;--c2:#5fd07a;--c3:#cd98f5;--c4:#e3b341;--c5:#ff7fa5;--c6:#56cfd8;--c7:#98a3af}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:84rem;background:var(--bg);color:var(--fg);
font:1rem/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.15rem;margin:2rem 0 .3rem}p{margin:.3rem 0;max-width:46rem}
.dim,figcaption small,footer{color:var(--dim)}
.grid{display:grid;gap:1rem;align-items:start;grid-template-columns:repeat(auto-fill,minmax(min(100%,23rem),1fr))}
figure{margin:0;padding:.75rem;background:var(--card);border:1px solid var(--line);border-radius:.5rem;min-width:0}
figcaption{font-weight:600;font-size:.95rem;margin-bottom:.4rem}figcaption small{display:block;font-weight:400}
svg{display:block;width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:var(--dim)}
svg text.in{fill:var(--bg);font-weight:600}svg text.end{font-weight:700}
.axis{stroke:var(--line);fill:none}.plot{fill:none;stroke-width:1.8;stroke-linejoin:round}
.ref{stroke:var(--fg);stroke-dasharray:6 4;fill:none}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1);stroke-dasharray:7 3}.s2{stroke:var(--c2);stroke-dasharray:2 3}
.s3{stroke:var(--c3);stroke-dasharray:9 3 2 3}.s4{stroke:var(--c4);stroke-dasharray:4 2}
.s5{stroke:var(--c5);stroke-dasharray:12 4}.s6{stroke:var(--c6);stroke-dasharray:1 2}
.s7{stroke:var(--c7);stroke-dasharray:5 5}
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}.f4{fill:var(--c4)}.f5{fill:var(--c5)}
.f6{fill:var(--c6)}.f7{fill:var(--c7)}.k0{color:var(--c0)}.k1{color:var(--c1)}.k2{color:var(--c2)}.k3{color:var(--c3)}
.k4{color:var(--c4)}.k5{color:var(--c5)}.k6{color:var(--c6)}.k7{color:var(--c7)}
svg.swatch{display:inline-block;width:1.8rem;height:.75rem;vertical-align:middle}
ul.key{list-style:none;margin:.4rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:.1rem .9rem;font-size:.85rem}
.scroll{overflow-x:auto}.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
.wide{min-width:56rem}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--dim);padding-top:.8rem}
th,td{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right;vertical-align:top;overflow-wrap:normal}
th:first-child{text-align:left;font-weight:600}td:not(.text){white-space:nowrap}
td.text{text-align:left;max-width:26rem}th.text{max-width:16rem}.text{min-width:9rem;overflow-wrap:anywhere}
.long{max-height:9rem;overflow-y:auto}.long:focus-visible{outline:2px solid var(--c0)}
thead th{color:var(--dim);font-weight:600}
details{margin-top:.5rem;font-size:.875rem}summary{cursor:pointer;color:var(--dim)}
.bad{color:var(--c5);font-weight:600;max-width:none}footer{margin-top:2.5rem;font-size:.85rem}
@media print{details{display:none}}
)";

struct Scale {
  double divisor;
  const char* unit;
};

// The largest of `scales`, which fall, that is not above `value`.
template <size_t N>
Scale ScaleFor(double value, const std::array<Scale, N>& scales) {
  for (const Scale& scale : scales) {
    if (std::fabs(value) >= scale.divisor) return scale;
  }
  return scales.back();
}

Scale ScaleOf(double value, Unit unit) {
  constexpr std::array<Scale, 5> kBinary = {
      {{0x1p40, "TiB"}, {0x1p30, "GiB"}, {0x1p20, "MiB"}, {0x1p10, "KiB"}, {1, "B"}}};
  constexpr std::array<Scale, 4> kRates = {{{1e9, "GB/s"}, {1e6, "MB/s"}, {1e3, "KB/s"}, {1, "B/s"}}};
  constexpr std::array<Scale, 5> kTimes = {{{3600, "h"}, {60, "min"}, {1, "s"}, {1e-3, "ms"}, {1e-6, "us"}}};
  constexpr std::array<Scale, 5> kCounts = {{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}, {1, ""}}};
  if (unit == Unit::kPlain) return {1, ""};
  if (unit == Unit::kCount) return ScaleFor(value, kCounts);
  if (value == 0) return {1, unit == Unit::kSeconds ? "s" : unit == Unit::kBytes ? "B" : "B/s"};
  if (unit == Unit::kSeconds) return ScaleFor(value, kTimes);
  return unit == Unit::kBytes ? ScaleFor(value, kBinary) : ScaleFor(value, kRates);
}

std::string InScale(double value, const Scale& scale, int digits) {
  const std::string number = Plain(value / scale.divisor, digits);
  const bool apart = scale.unit[0] != '\0' && scale.unit[1] != '\0';
  return absl::StrCat(
      number, apart || scale.unit[0] == 's' || scale.unit[0] == 'h' || scale.unit[0] == 'B' ? " " : "",
      scale.unit);
}

}  // namespace

std::string Escape(std::string_view text) {
  // The library's writer replaces what is no UTF-8, and its reader gives the rest back as it was.
  const std::string valid =
      nlohmann::json::parse(
          nlohmann::json(std::string(text)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))
          .get<std::string>();
  std::string escaped;
  for (const char c : valid) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c;
    }
  }
  return escaped;
}

std::string Plain(double value, int digits) {
  const double size = std::fabs(value);
  if (size >= std::pow(10, digits) - 0.5 && size < 1e9) return absl::StrFormat("%.0f", value);
  return absl::StrFormat("%.*g", digits, value);
}

std::string Format(double value, Unit unit) {
  if (!std::isfinite(value)) return "-";
  return InScale(value, ScaleOf(value, unit), unit == Unit::kPlain ? 5 : 4);
}

std::string FormatTick(double value, double largest, Unit unit) {
  return InScale(value, ScaleOf(largest, unit), 4);
}

std::string Table(std::string_view caption, const std::vector<std::string>& columns,
                  const std::vector<std::vector<std::string>>& rows) {
  std::string html = "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"table\"><table>";
  if (!caption.empty()) absl::StrAppend(&html, "<caption>", Escape(caption), "</caption>");
  absl::StrAppend(&html, "<thead><tr>");
  // A cell of several words reads from the left, and one of many lines scrolls: neither pushes others away.
  constexpr size_t kText = 24, kLong = 300;
  for (const std::string& column : columns) {
    absl::StrAppend(&html, column.size() > kText ? "<th scope=\"col\" class=\"text\">" : "<th scope=\"col\">",
                    Escape(column), "</th>");
  }
  absl::StrAppend(&html, "</tr></thead><tbody>\n");
  for (const std::vector<std::string>& row : rows) {
    absl::StrAppend(&html, "<tr>");
    for (size_t i = 0; i < row.size(); ++i) {
      const char* const of_class = row[i].size() > kText ? " class=\"text\"" : "";
      absl::StrAppend(&html, i == 0 ? "<th scope=\"row\"" : "<td", of_class, ">");
      absl::StrAppend(&html,
                      row[i].size() > kLong
                          ? absl::StrCat("<div class=\"long\" tabindex=\"0\">", Escape(row[i]), "</div>")
                          : Escape(row[i]),
                      i == 0 ? "</th>" : "</td>");
    }
    absl::StrAppend(&html, "</tr>\n");
  }
  return html + "</tbody></table></div>\n";
}

std::string Numbers(const std::string& table) {
  return absl::StrCat("<details><summary>as numbers</summary>", table, "</details>\n");
}

std::string Section(std::string_view heading, std::string_view lead, const std::string& body) {
  return absl::StrCat("<section><h2>", Escape(heading), "</h2>\n",
                      lead.empty() ? "" : absl::StrCat("<p class=\"dim\">", Escape(lead), "</p>\n"), body,
                      "</section>\n");
}

std::string Grid(const std::vector<std::string>& figures) {
  std::string html = "<div class=\"grid\">\n";
  for (const std::string& figure : figures) html += figure;
  return html + "</div>\n";
}

std::string Page(std::string_view title, std::string_view lead, const std::string& body) {
  return absl::StrCat(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
      "img-src data:\">\n"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
      "<link rel=\"icon\" href=\"data:,\">\n<title>",
      Escape(title), "</title>\n<style>", std::string(kStyle), "</style></head>\n<body><main>\n<h1>",
      Escape(title), "</h1>\n<p class=\"dim\">", Escape(lead), "</p>\n", body, "</main>\n<footer>Penstock ",
      kVersion, "</footer></body></html>\n");
}

}  // namespace penstock::tools

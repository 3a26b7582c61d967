#include "tools/pages/chart.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace penstock::tools {
namespace {

constexpr double kWidth = 420, kHeight = 236;
constexpr double kLeft = 66, kRight = 404, kTop = 10, kBottom = 194;
constexpr int kStyles = 8;
constexpr int kColumns = 240;  // of a picture, in which points are gathered
constexpr int kRows = 12;      // of a table of numbers
// Beyond this differences of two values may be no numbers any more.
constexpr double kLargest = 1e300;

int StyleOf(int style) { return style % kStyles; }

// Round or square by turns: runs are not told by colour alone.
std::string DotOf(int style, double x, double y) {
  if (style % 2 == 0)
    return absl::StrFormat("<circle class=\"f%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.2\"/>", style, x, y);
  return absl::StrFormat("<rect class=\"f%d\" x=\"%.1f\" y=\"%.1f\" width=\"5.5\" height=\"5.5\"/>", style,
                         x - 2.75, y - 2.75);
}

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  bool empty() const { return !(low <= high); }
  void Add(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, std::clamp(value, -kLargest, kLargest));
    high = std::max(high, std::clamp(value, -kLargest, kLargest));
  }
  // Room to draw in, also where all values are one.
  void Widen() {
    if (high > low) return;
    if (low == 0) {
      high = 1;
      return;
    }
    const double by = std::fabs(low) * 0.05;
    low -= by;
    high += by;
  }
};

// Where values stand in the picture.
class Frame {
 public:
  Frame(Range x, Range y, bool log_scale) : x_(x), y_(y), log_(log_scale) {
    x_.Widen();
    y_.Widen();
    if (log_ && y_.low <= 0) log_ = false;
  }
  double X(double x) const { return kLeft + (x - x_.low) / (x_.high - x_.low) * (kRight - kLeft); }
  double Y(double y) const {
    y = std::clamp(y, y_.low, y_.high);
    const double share =
        log_ ? std::log(y / y_.low) / std::log(y_.high / y_.low) : (y - y_.low) / (y_.high - y_.low);
    return kBottom - share * (kBottom - kTop);
  }
  std::string Axes(const ChartText& text) const {
    std::string svg;
    for (const double tick : log_ ? LogTicks() : Ticks(y_.low, y_.high, 5, text.y_unit)) {
      const double at = Y(tick);
      absl::StrAppendFormat(&svg, "<path class=\"axis\" d=\"M%.0f %.1fH%.0f\"/>", kLeft, at, kRight);
      absl::StrAppendFormat(
          &svg, "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", kLeft - 6, at + 4,
          Escape(FormatTick(tick, std::max(std::fabs(y_.low), std::fabs(y_.high)), text.y_unit)));
    }
    for (const double tick : Ticks(x_.low, x_.high, 6, text.whole_x ? Unit::kCount : text.x_unit)) {
      absl::StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%s</text>\n", X(tick),
                            kBottom + 17, Escape(FormatTick(tick, x_.high, text.x_unit)));
    }
    absl::StrAppendFormat(&svg, "<path class=\"axis\" d=\"M%.0f %.0fV%.0fH%.0f\"/>", kLeft, kTop, kBottom,
                          kRight);
    absl::StrAppendFormat(&svg, "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\">%s</text>\n",
                          (kLeft + kRight) / 2, kHeight - 6, Escape(text.x_label));
    return svg;
  }

 private:
  std::vector<double> LogTicks() const {
    std::vector<double> ticks;
    double decade = std::pow(10, std::floor(std::log10(y_.low)));
    while (decade <= y_.high) {
      for (const double by : {1.0, 2.0, 5.0}) {
        if (decade * by >= y_.low && decade * by <= y_.high) ticks.push_back(decade * by);
      }
      decade *= 10;
    }
    if (ticks.size() < 2) return Ticks(y_.low, y_.high, 4, Unit::kPlain);
    // No more than there is room for.
    while (ticks.size() > 7) {
      std::vector<double> fewer;
      for (size_t i = 0; i < ticks.size(); i += 2) fewer.push_back(ticks[i]);
      ticks.swap(fewer);
    }
    return ticks;
  }

  Range x_, y_;
  bool log_;
};

// Points that stand in one column of the picture: the first, the least, the greatest, the last.
std::vector<Point> Thinned(const std::vector<Point>& points) {
  if (points.size() <= 2 * kColumns) return points;
  std::vector<Point> thin;
  const double low = points.front().x, width = (points.back().x - low) / kColumns;
  for (size_t begin = 0; begin < points.size();) {
    const double end_x = low + width * (std::floor((points[begin].x - low) / width) + 1);
    size_t end = begin, least = begin, greatest = begin;
    for (; end < points.size() && (end == begin || points[end].x < end_x); ++end) {
      if (!(points[end].y >= points[least].y)) least = end;
      if (!(points[end].y <= points[greatest].y)) greatest = end;
    }
    std::vector<size_t> kept = {begin, least, greatest, end - 1};
    std::sort(kept.begin(), kept.end());
    kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
    for (const size_t at : kept) thin.push_back(points[at]);
    begin = end;
  }
  return thin;
}

std::string LineOf(const Series& series, const Frame& frame) {
  const std::vector<Point> points = Thinned(series.points);
  const int style = StyleOf(series.style);
  std::string svg, path;
  const Point* last = nullptr;
  bool pen_down = false;
  for (size_t i = 0; i < points.size(); ++i) {
    const Point& point = points[i];
    if (!std::isfinite(point.y)) {
      pen_down = false;
      continue;
    }
    last = &point;
    const bool alone = !pen_down && (i + 1 == points.size() || !std::isfinite(points[i + 1].y));
    if (series.dots || alone) {
      svg += DotOf(style, frame.X(point.x), frame.Y(point.y));
    }
    absl::StrAppendFormat(&path, "%s%.1f %.1f", pen_down ? "L" : "M", frame.X(point.x), frame.Y(point.y));
    pen_down = true;
  }
  if (last == nullptr) return "";
  if (!series.dots) absl::StrAppendFormat(&svg, "<path class=\"plot s%d\" d=\"%s\"/>", style, path);
  return absl::StrCat("<g><title>", Escape(series.name), "</title>", svg, "</g>\n");
}

// As much of both ends as there is room for; no character is cut.
std::string Shortened(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  const auto inside = [&](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80; };
  size_t head = most / 2, tail = text.size() - most / 2;
  while (head > 0 && inside(head)) --head;
  while (tail < text.size() && inside(tail)) ++tail;
  return absl::StrCat(text.substr(0, head), "\u2026", text.substr(tail));
}

std::string Svg(const ChartText& text, const std::string& alt, const std::string& inside) {
  return absl::StrFormat("<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"%s\">\n%s</svg>\n", kWidth,
                         kHeight, Escape(absl::StrCat(text.title, ". ", alt)), inside);
}

std::string Empty(const ChartText& text) {
  return Figure(text, "<p class=\"dim\">There is nothing to draw: no values.</p>\n", "");
}

// A few rows of all points, by the x of the series that has the most.
std::string PointTable(const ChartText& text, const std::vector<Series>& all) {
  std::vector<const Series*> lines;
  for (const Series& series : all) {
    if (!series.points.empty()) lines.push_back(&series);
  }
  std::vector<double> at;
  for (const Series* series : lines) {
    const size_t count = series->points.size();
    const size_t rows = std::min<size_t>(count, kRows);
    for (size_t r = 0; r < rows; ++r)
      at.push_back(series->points[rows == 1 ? 0 : r * (count - 1) / (rows - 1)].x);
  }
  std::sort(at.begin(), at.end());
  at.erase(std::unique(at.begin(), at.end()), at.end());
  std::vector<std::string> columns = {text.x_label};
  for (const Series* series : lines) columns.push_back(series->name);
  std::vector<std::vector<std::string>> rows;
  for (const double x : at) {
    rows.push_back({Format(x, text.x_unit)});
    for (const Series* series : lines) {
      const auto it = std::lower_bound(series->points.begin(), series->points.end(), x,
                                       [](const Point& point, double value) { return point.x < value; });
      const bool there = it != series->points.end() && it->x == x;
      rows.back().push_back(there ? Format(it->y, text.y_unit) : "");
    }
  }
  return Numbers(Table("", columns, rows));
}

std::string Key(const std::vector<Series>& all, bool filled) {
  std::string html = "<ul class=\"key\">";
  for (const Series& series : all) {
    html += KeyEntry(series.name, series.style,
                     series.dots ? Mark::kDot
                     : filled    ? Mark::kArea
                                 : Mark::kLine);
  }
  return html + "</ul>\n";
}

// Of each series, its first and its last value.
std::string InWords(const ChartText& text, const std::vector<Series>& all) {
  std::vector<std::string> words;
  for (const Series& series : all) {
    double first = std::nan(""), last = first;
    for (const Point& point : series.points) {
      if (!std::isfinite(point.y)) continue;
      if (!std::isfinite(first)) first = point.y;
      last = point.y;
    }
    if (!std::isfinite(first)) continue;
    words.push_back(
        absl::StrCat(series.name, " from ", Format(first, text.y_unit), " to ", Format(last, text.y_unit)));
  }
  return absl::StrJoin(words, "; ");
}

}  // namespace

std::vector<double> Ticks(double low, double high, int most, Unit unit) {
  std::vector<double> ticks;
  if (!(high > low) || !std::isfinite(low) || !std::isfinite(high)) return ticks;
  // Bytes are round in the unit that they are printed in.
  double base = 1;
  for (const double binary : {0x1p40, 0x1p30, 0x1p20, 0x1p10}) {
    if (unit == Unit::kBytes && base == 1 && high >= binary) base = binary;
  }
  const double rough = (high - low) / base / most;
  const double decade = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * decade;
  for (const double by : {5.0, 2.0, 1.0}) {
    if (by * decade >= rough) step = by * decade;
  }
  if (unit == Unit::kCount || unit == Unit::kBytes) step = std::max(step, base == 1 ? 1.0 : 0.0);
  step *= base;
  const double first = std::ceil(low / step - 1e-9);
  for (int64_t i = 0; (first + static_cast<double>(i)) * step <= high + step * 1e-9; ++i)
    ticks.push_back((first + static_cast<double>(i)) * step + 0.0);  // no -0
  return ticks;
}

std::string KeyEntry(const std::string& name, int style, Mark mark) {
  const int number = StyleOf(style);
  const std::string picture =
      mark == Mark::kDot ? DotOf(number, 14, 6)
      : mark == Mark::kLine
          ? absl::StrFormat("<path class=\"plot s%d\" d=\"M0 6H28\"/>", number)
          : absl::StrFormat("<rect class=\"f%d\" width=\"28\" height=\"12\" rx=\"2\"/>", number);
  return absl::StrCat("<li><svg class=\"swatch\" viewBox=\"0 0 28 12\" aria-hidden=\"true\">", picture,
                      "</svg> ", Escape(name), "</li>");
}

std::string Figure(const ChartText& text, const std::string& svg, const std::string& below) {
  return absl::StrCat("<figure><figcaption>", Escape(text.title),
                      text.lead.empty() ? "" : absl::StrCat("<small>", Escape(text.lead), "</small>"),
                      "</figcaption>\n", svg, below, "</figure>\n");
}

std::string Draw(const LineChart& chart) {
  Range x, y;
  for (const Series& series : chart.series) {
    for (const Point& point : series.points) {
      if (!std::isfinite(point.y)) continue;
      x.Add(point.x);
      y.Add(point.y);
    }
  }
  if (y.empty()) return Empty(chart.text);
  if (chart.from_zero) y.Add(0);
  const Frame frame(x, y, chart.log_scale && y.low > 0 && y.high > 4 * y.low);
  std::string svg = frame.Axes(chart.text);
  for (const Series& series : chart.series) svg += LineOf(series, frame);
  return Figure(chart.text, Svg(chart.text, InWords(chart.text, chart.series), svg),
                Key(chart.series, /*filled=*/false) + PointTable(chart.text, chart.series));
}

std::string Draw(const LayerChart& chart) {
  Range x, y;
  size_t count = 0;
  for (const Series& layer : chart.layers) {
    for (const Point& point : layer.points) x.Add(point.x);
    count = std::max(count, layer.points.size());
  }
  if (x.empty()) return Empty(chart.text);
  // What the last value holds for.
  double last = 1;
  for (const Series& layer : chart.layers) {
    const size_t points = layer.points.size();
    if (points > 1) last = layer.points[points - 1].x - layer.points[points - 2].x;
  }
  const double until_x = x.high + last;
  x.Add(until_x);
  std::vector<double> below(count, 0);
  y.Add(0);
  const auto height = [](const Point& point) {
    return std::isfinite(point.y) ? std::max(0.0, point.y) : 0.0;
  };
  for (const Series& layer : chart.layers) {
    for (size_t i = 0; i < layer.points.size(); ++i) below[i] += height(layer.points[i]);
  }
  for (const double top : below) y.Add(top);
  if (chart.bound.has_value()) y.Add(*chart.bound * 1.02);
  const Frame frame(x, y, /*log_scale=*/false);
  std::fill(below.begin(), below.end(), 0);
  std::string areas;
  for (const Series& layer : chart.layers) {
    std::string up, down;
    for (size_t i = 0; i < layer.points.size(); ++i) {
      const double at = frame.X(layer.points[i].x);
      const double until = i + 1 < layer.points.size() ? frame.X(layer.points[i + 1].x) : frame.X(until_x);
      const double low = frame.Y(below[i]), high = frame.Y(below[i] += height(layer.points[i]));
      absl::StrAppendFormat(&up, "%s%.1f %.1fH%.1f", i == 0 ? "M" : "L", at, high, until);
      down.insert(0, absl::StrFormat("L%.1f %.1fH%.1f", until, low, at));
    }
    absl::StrAppendFormat(&areas, "<path class=\"f%d\" d=\"%s%sZ\"><title>%s</title></path>\n",
                          StyleOf(layer.style), up, down, Escape(layer.name));
  }
  if (chart.bound.has_value()) {
    absl::StrAppendFormat(&areas, "<path class=\"ref\" d=\"M%.0f %.1fH%.0f\"><title>%s</title></path>\n",
                          kLeft, frame.Y(*chart.bound), kRight, Escape(chart.bound_name));
  }
  return Figure(chart.text,
                Svg(chart.text, InWords(chart.text, chart.layers), areas + frame.Axes(chart.text)),
                Key(chart.layers, /*filled=*/true) + PointTable(chart.text, chart.layers));
}

std::string Draw(const BarChart& chart) {
  std::map<std::string, int> styles;
  std::vector<std::string> names;
  double longest = 0;
  for (const Bar& bar : chart.bars) {
    double sum = 0;
    for (const BarPart& part : bar.parts) {
      if (styles.emplace(part.name, static_cast<int>(names.size())).second) names.push_back(part.name);
      if (std::isfinite(part.value)) sum += std::max(0.0, part.value);
    }
    longest = std::max(longest, sum);
  }
  if (longest <= 0) return Empty(chart.text);
  constexpr double kPitch = 44, kThick = 22, kX = 4, kSpan = kWidth - 2 * kX;
  std::string svg;
  std::vector<std::vector<std::string>> rows;
  double y = 4;
  for (const Bar& bar : chart.bars) {
    double sum = 0;
    std::string parts;
    std::vector<std::string> row = {bar.name};
    for (const std::string& name : names) {
      const auto it =
          std::find_if(bar.parts.begin(), bar.parts.end(), [&](const BarPart& p) { return p.name == name; });
      row.push_back(it == bar.parts.end() ? "" : Format(it->value, chart.text.y_unit));
      if (it == bar.parts.end() || !std::isfinite(it->value) || it->value <= 0) continue;
      const double x = kX + sum / longest * kSpan, width = it->value / longest * kSpan;
      const int style = styles[name];
      absl::StrAppendFormat(&parts,
                            "<rect class=\"f%d\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" "
                            "height=\"%.0f\"><title>%s: %s</title></rect>",
                            StyleOf(style), x, y + 15, std::max(0.5, width - 0.7), kThick, Escape(name),
                            Format(it->value, chart.text.y_unit));
      if (width > 14 && names.size() > 1) {
        absl::StrAppendFormat(&parts,
                              "<text class=\"in\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%d</text>",
                              x + width / 2, y + 30, style + 1);
      }
      sum += it->value;
    }
    row.push_back(Format(sum, chart.text.y_unit));
    rows.push_back(std::move(row));
    constexpr size_t kLetters = 44;  // that have room beside a value
    absl::StrAppendFormat(&svg, "<g><title>%s</title><text x=\"%.0f\" y=\"%.1f\">%s: %s</text></g>%s\n",
                          Escape(bar.name), kX, y + 10, Escape(Shortened(bar.name, kLetters)),
                          Format(sum, chart.text.y_unit), parts);
    y += kPitch;
  }
  std::string key = "<ul class=\"key\">";
  for (const std::string& name : names) {
    if (names.size() > 1)
      key += KeyEntry(absl::StrCat(styles[name] + 1, " ", name), styles[name], Mark::kArea);
  }
  std::vector<std::string> columns = {""};
  columns.insert(columns.end(), names.begin(), names.end());
  columns.push_back("together");
  const std::string picture =
      absl::StrFormat("<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"%s\">\n%s</svg>\n", kWidth, y,
                      Escape(absl::StrCat(chart.text.title, "; as numbers below")), svg);
  return Figure(chart.text, picture, absl::StrCat(key, "</ul>\n", Numbers(Table("", columns, rows))));
}

}  // namespace penstock::tools

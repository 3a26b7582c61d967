// Pictures as inline SVG, each a <figure> that says in words what it shows and has its numbers in a table.
#ifndef PENSTOCK_TOOLS_PAGES_CHART_H_
#define PENSTOCK_TOOLS_PAGES_CHART_H_

#include <optional>
#include <string>
#include <vector>

#include "tools/pages/markup.h"

namespace penstock::tools {

struct Point {
  double x = 0;
  double y = 0;  // not finite: the line has a gap here
};

// One line of a chart. `style` counts the page's runs or causes: it chooses colour and dashes.
struct Series {
  std::string name;
  int style = 0;
  std::vector<Point> points = {};  // x rises
  bool dots = false;               // points apart, not a line
};

struct ChartText {
  std::string title = {};
  std::string lead = {};  // what is drawn, and how to read it
  std::string x_label = {};
  Unit x_unit = Unit::kPlain;
  Unit y_unit = Unit::kPlain;
  bool whole_x = false;  // x counts something: no tick stands between two
};

// Lines over one axis. However many points there are, the picture stays small: of each column of it the
// first, least, greatest and last value are drawn. `log_scale` takes effect where all values are positive.
struct LineChart {
  ChartText text;
  std::vector<Series> series = {};
  bool from_zero = false;
  bool log_scale = false;
};
std::string Draw(const LineChart& chart);

// Layers one upon the other: value y of a layer holds from its x to the next one's, the last one's for as
// long as that of the one before, or for 1. All have the same x.
struct LayerChart {
  ChartText text;
  std::vector<Series> layers;
  std::optional<double> bound = std::nullopt;  // a line across: what there may be at the most
  std::string bound_name = {};
};
std::string Draw(const LayerChart& chart);

// A bar for each row, cut into parts; parts of one name have one style.
struct BarPart {
  std::string name;
  double value = 0;
};
struct Bar {
  std::string name;
  std::vector<BarPart> parts;
};
struct BarChart {
  ChartText text;
  std::vector<Bar> bars;
};
std::string Draw(const BarChart& chart);

// From `low` to `high` at round numbers, at most about `most` of them.
std::vector<double> Ticks(double low, double high, int most, Unit unit);

// `text` around an SVG: caption, legend, numbers.
std::string Figure(const ChartText& text, const std::string& svg, const std::string& below);
// The legend's entry of a style, as it looks in the picture.
enum class Mark { kLine, kArea, kDot };
std::string KeyEntry(const std::string& name, int style, Mark mark);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_CHART_H_

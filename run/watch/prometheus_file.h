// A page of figures in Prometheus's text format, for the textfile collector of node_exporter: it reads every
// FILE.prom of a directory as it is scraped, so the page is replaced as a whole each time.
//
// Figures are only for observers: a page that cannot be written costs nothing but a line, and is tried
// again with the next ones.
#ifndef PENSTOCK_RUN_WATCH_PROMETHEUS_FILE_H_
#define PENSTOCK_RUN_WATCH_PROMETHEUS_FILE_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace penstock::run {

using Labels = std::vector<std::pair<std::string, std::string>>;

// One figure, for each value of one more label or of none.
struct Metric {
  enum class Type { kGauge, kCounter };  // what goes up and down; what only rises, but with a new process
  struct Sample {
    Labels labels;
    double value = 0;
  };
  std::string_view name;  // "penstock_tokens_total"
  std::string_view help;
  Type type = Type::kGauge;
  std::vector<Sample> samples;
};

// HELP, TYPE and samples of each, with `labels` before their own.
std::string PrometheusText(const std::vector<Metric>& metrics, const Labels& labels);

class PrometheusFile {
 public:
  PrometheusFile(std::string path, Labels labels) : path_(std::move(path)), labels_(std::move(labels)) {}
  // Replaces the page. Returns the error if it could not, once for each time of failure.
  absl::Status Write(const std::vector<Metric>& metrics);

 private:
  const std::string path_;
  const Labels labels_;
  bool failing_ = false;
};

}  // namespace penstock::run

#endif  // PENSTOCK_RUN_WATCH_PROMETHEUS_FILE_H_

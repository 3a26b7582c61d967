#include "run/watch/prometheus_file.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/whole_file.h"

namespace penstock::run {
namespace {

std::string NumberText(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return absl::StrFormat("%.17g", value);
}

void AppendLabels(const Labels& labels, std::string* text) {
  for (const auto& [name, value] : labels) {
    if (text->back() != '{') *text += ",";
    absl::StrAppend(text, name, "=\"",
                    absl::StrReplaceAll(value, {{"\\", "\\\\"}, {"\"", "\\\""}, {"\n", "\\n"}}), "\"");
  }
}

}  // namespace

std::string PrometheusText(const std::vector<Metric>& metrics, const Labels& labels) {
  std::string text;
  for (const Metric& metric : metrics) {
    absl::StrAppend(&text, "# HELP ", std::string(metric.name), " ", std::string(metric.help), "\n");
    absl::StrAppend(&text, "# TYPE ", std::string(metric.name),
                    metric.type == Metric::Type::kCounter ? " counter\n" : " gauge\n");
    for (const Metric::Sample& sample : metric.samples) {
      text += metric.name;
      text += "{";
      AppendLabels(labels, &text);
      AppendLabels(sample.labels, &text);
      absl::StrAppend(&text, "} ", NumberText(sample.value), "\n");
    }
  }
  return text;
}

absl::Status PrometheusFile::Write(const std::vector<Metric>& metrics) {
  const absl::Status status =
      WriteWholeFile("`prometheus`", path_, PrometheusText(metrics, labels_), /*durable=*/false);
  const bool told = std::exchange(failing_, !status.ok());
  return told ? absl::OkStatus() : status;
}

}  // namespace penstock::run

// `penstock report`: what trainings left in files, as one page to look at.
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/status_macros.h"
#include "base/whole_file.h"
#include "tools/base/cli.h"
#include "tools/base/verbs.h"
#include "tools/pages/report_page.h"
#include "tools/pages/run_files.h"

namespace penstock::tools {
namespace {

constexpr const char* kReportName = "penstock report";

absl::Status Report(const std::vector<std::string>& files, const std::string& html, double rated_bytes) {
  RETURN_IF_ERROR(CheckIsNoInput("--html", html, files));
  ASSIGN_OR_RETURN(const std::vector<Run> runs, ReadRuns(files));
  return WriteWholeFile("--html", html, ReportPage(runs, rated_bytes));
}

}  // namespace

int RunReport(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("Draws trainings from their files as one page, several of them side by side", kReportName);
  std::vector<std::string> files;
  std::string html;
  double terabytes_written = 600;
  app.add_option(
         "FILE", files,
         "Files of --report, --log or --trace, recognised by their contents: logs and traces join the report "
         "of their run; a trace that names no run joins the file before it")
      ->required();
  app.add_option("--html", html, "Where the page is written: one file, which asks the network for nothing")
      ->required();
  app.add_option("--tbw", terabytes_written, "Terabytes (10^12) that one drive is rated to be written [600]")
      ->check(CLI::Range(0.001, 1e9));
  if (const auto code = ParseFlags(app, argc, argv, out, err)) return *code;
  const absl::Status status = Report(files, html, terabytes_written * 1e12);
  return status.ok() ? kExitOk : Fail(kReportName, status, err);
}

}  // namespace penstock::tools

// Trainings as one page: what they were, how they went, where the time and the bytes went, side by side.
#ifndef PENSTOCK_TOOLS_PAGES_REPORT_PAGE_H_
#define PENSTOCK_TOOLS_PAGES_REPORT_PAGE_H_

#include <string>
#include <vector>

#include "tools/pages/run_files.h"

namespace penstock::tools {

// The HTML of at least one run. `rated_bytes_written`: of one drive, its TBW rating.
std::string ReportPage(const std::vector<Run>& runs, double rated_bytes_written);

}  // namespace penstock::tools

#endif  // PENSTOCK_TOOLS_PAGES_REPORT_PAGE_H_

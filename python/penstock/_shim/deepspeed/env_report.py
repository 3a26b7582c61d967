"""What `ds_report` tells."""

from typing import List, Optional

from penstock._programs import report_environment


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False, arguments: Optional[List[str]] = None) -> int:
    """Prints it. The first two are DeepSpeed's: there are no operators to build, and each lack has a line of its own."""
    return report_environment(arguments or [])


def cli_main() -> None:
    main()

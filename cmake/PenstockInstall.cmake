# Filled in by the rooms that install: headers under include/penstock/<room>/, libraries and the package file.

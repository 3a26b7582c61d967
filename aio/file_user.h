// How a file tells those who keep something about it that it is about to close.
#ifndef PENSTOCK_AIO_FILE_USER_H_
#define PENSTOCK_AIO_FILE_USER_H_

namespace penstock::aio {

class File;

class FileUser {
 public:
  virtual ~FileUser() = default;
  // Called by ~File; when it returns nothing of the file is kept, its descriptor included.
  virtual void ForgetFile(File& file) = 0;
};

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_FILE_USER_H_

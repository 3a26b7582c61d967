// The structures of cuFile's interface, for its stand-ins. Apart from the product's own (aio/cufile.cc), so
// that a mistake there is seen.
#ifndef PENSTOCK_TESTS_CUFILE_ABI_H_
#define PENSTOCK_TESTS_CUFILE_ABI_H_

struct Error {
  int error;
  int cuda_error;
};
struct Descriptor {
  int type;  // 1: a file descriptor
  union {
    int fd;
    void* handle;
  };
  const void* operations;
};

#endif  // PENSTOCK_TESTS_CUFILE_ABI_H_

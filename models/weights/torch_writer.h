// Files that torch.load reads, tensors streamed in: what models/weights/torch_file.h reads, the other way.
//
//   TorchPickle pickle;
//   pickle.BeginDict();
//   pickle.Text("param");
//   pickle.Tensor(Dtype::kF32, {768, 2304});   // storage 0
//   pickle.Text("cat_dim");
//   pickle.Int(0);
//   pickle.EndDict();
//   ASSIGN_OR_RETURN(auto file, TorchWriter::Create("fp32.pt", pickle, &stream));
//   status = file->Append(bytes);              // as often as it takes: storage after storage
//   status = file->Finish();
//
// The file is a zip with stored members, protocol 2, little-endian; a storage begins at a multiple of 64
// bytes. Bytes go to the drive through a stream (swap/write_stream.h), which has one file at a time and is
// used again for the next. Memory: the pickle. Threads: one. Errors: what the operating system said, with
// path, offset, length and errno.
#ifndef PENSTOCK_MODELS_WEIGHTS_TORCH_WRITER_H_
#define PENSTOCK_MODELS_WEIGHTS_TORCH_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "swap/safetensors.h"
#include "swap/write_stream.h"

namespace penstock::models {

// The description of a file's values, one after the other; what is between Begin and End belongs to the dict
// (key, value, key, value, ...) or list.
class TorchPickle {
 public:
  TorchPickle();
  void None() { code_ += 'N'; }
  void Bool(bool value) { code_ += value ? '\x88' : '\x89'; }
  void Int(int64_t value);
  void Float(double value);
  void Text(std::string_view text);
  void BeginDict() { code_ += "}("; }
  void EndDict() { code_ += 'u'; }
  void BeginList() { code_ += "]("; }
  void EndList() { code_ += 'e'; }
  // Objects become dicts, with their keys as texts.
  void Json(const nlohmann::json& value);
  // What `__new__` of a class makes, with a dict of attributes that follows: BeginObject("deepspeed.x", "Y"),
  // a dict, EndObject.
  void BeginObject(std::string_view module, std::string_view name);
  void EndObject() { code_ += 'b'; }
  // A tensor of a storage of its own. Returns the storage's number.
  size_t Tensor(swap::Dtype dtype, const std::vector<uint64_t>& sizes);

 private:
  friend class TorchWriter;
  void Name(std::string_view module, std::string_view name);
  std::string code_;
  std::vector<uint64_t> storages_;  // bytes
};

class TorchWriter {
 public:
  // Makes the file, or empties the one that is there. `stream` outlives the writer.
  static absl::StatusOr<std::unique_ptr<TorchWriter>> Create(const std::string& path,
                                                             const TorchPickle& pickle,
                                                             swap::WriteStream* stream);

  // The next bytes of the storages, one after the other. kInvalidArgument: more than they have.
  absl::Status Append(std::span<const std::byte> bytes);
  // The end of the file sets out, and Finish has less to wait for. kFailedPrecondition: bytes are missing.
  absl::Status End();
  // Ends the file, if End has not, and closes it. Without it the file is none that can be read.
  absl::Status Finish();

 private:
  struct Member {
    std::string name;
    uint64_t header = 0, data = 0, bytes = 0;  // where its local header and its data begin; its length
    uint64_t written = 0;
    uint32_t crc = 0;
  };
  TorchWriter(std::string path, swap::WriteStream* stream) : path_(std::move(path)), stream_(*stream) {}
  void Add(const std::string& name, uint64_t bytes);
  std::string LocalHeader(const Member& member) const;
  absl::Status Put(std::string_view text);
  absl::Status PutMember(Member* member, std::string_view contents);
  absl::Status SkipEmpty();

  const std::string path_;
  swap::WriteStream& stream_;
  uint64_t end_ = 0;
  size_t now_ = 0;  // the member that is being written
  bool ended_ = false;
  std::vector<Member> members_;
};

}  // namespace penstock::models

#endif  // PENSTOCK_MODELS_WEIGHTS_TORCH_WRITER_H_

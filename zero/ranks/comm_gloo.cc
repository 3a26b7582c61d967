// A mesh over Gloo: one connection to every other rank, messages without copies.
//
// Gloo takes whatever comes under a number: a shorter message is received as if it were whole, a longer one
// ends the process. What the number is made of keeps that away (watched_comm.cc).
#include "zero/ranks/comm.h"

#ifdef PENSTOCK_HAVE_GLOO

#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "zero/ranks/watched_comm.h"

namespace penstock::zero {
namespace {

using Clock = std::chrono::steady_clock;
using Buffer = gloo::transport::UnboundBuffer;

// Beyond any patience: what bounds a wait is the other rank's sign of life.
constexpr auto kForever = std::chrono::hours(24 * 30);
constexpr uint64_t kProbeSlot = uint64_t{kChannels} << 56;  // beyond those of the channels (watched_comm.cc)

// The meeting point as Gloo wants it.
class GlooStore : public gloo::rendezvous::Store {
 public:
  GlooStore(TcpStore* store, std::string prefix, std::chrono::milliseconds patience)
      : store_(store), prefix_(std::move(prefix)), patience_(patience) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    store_->Set(prefix_ + key, {data.begin(), data.end()});
  }
  std::vector<char> get(const std::string& key) override {
    wait({key});
    const std::string data = store_->Get(prefix_ + key);
    return {data.begin(), data.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, patience_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    const auto until = Clock::now() + std::min(timeout, patience_);
    for (const std::string& key : keys) {
      while (!store_->Has(prefix_ + key)) {
        if (Clock::now() > until) throw std::runtime_error("not all ranks are there");
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
  }

 private:
  TcpStore* const store_;
  const std::string prefix_;
  const std::chrono::milliseconds patience_;
};

class GlooMessage final : public Message {
 public:
  GlooMessage(std::unique_ptr<Buffer> buffer, int peer, bool sends, size_t bytes)
      : buffer_(std::move(buffer)), peer_(peer), sends_(sends), bytes_(bytes) {}

  void Start(uint64_t number) override {
    sends_ ? buffer_->send(peer_, number, 0, bytes_) : buffer_->recv(peer_, number, 0, bytes_);
  }
  bool Wait() override { return sends_ ? buffer_->waitSend(kForever) : buffer_->waitRecv(kForever); }
  void GiveUp() override { sends_ ? buffer_->abortWaitSend() : buffer_->abortWaitRecv(); }

 private:
  const std::unique_ptr<Buffer> buffer_;
  const int peer_;
  const bool sends_;
  const size_t bytes_;
};

class GlooMesh final : public Mesh {
 public:
  explicit GlooMesh(const MeshPlace& place) {
    gloo::transport::tcp::attr attributes;
    if (const auto interface = ProcessEnvironment("GLOO_SOCKET_IFNAME"); interface.has_value()) {
      attributes.iface = *interface;
    } else {
      attributes.hostname = place.address;
    }
    std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attributes);
    auto context = std::make_shared<gloo::rendezvous::Context>(place.rank, place.world);
    context->setTimeout(place.wait);
    GlooStore meeting(place.store, place.prefix, place.wait);
    context->connectFullMesh(meeting, device);
    context->setTimeout(kForever);
    context_ = std::move(context);
    for (int k = 0; k < place.world; ++k) {
      probes_.push_back(k == place.rank ? nullptr : context_->createUnboundBuffer(&probed_, 1));
      if (k != place.rank) probes_.back()->recv(k, kProbeSlot, 0, 1);
    }
  }

  std::unique_ptr<Message> Send(int to, const void* data, size_t bytes) override {
    return std::make_unique<GlooMessage>(context_->createUnboundBuffer(const_cast<void*>(data), bytes), to,
                                         /*sends=*/true, bytes);
  }
  std::unique_ptr<Message> Receive(int from, void* data, size_t bytes) override {
    return std::make_unique<GlooMessage>(context_->createUnboundBuffer(data, bytes), from, /*sends=*/false,
                                         bytes);
  }

  // Gloo tells a broken connection to every receive whose message has not begun, but not to one whose message
  // breaks off in the middle. So one that nobody ever sends to waits beside them: asked to give up, it says
  // at once what it has been told.
  void Probe(int peer) override {
    Buffer& probe = *probes_[static_cast<size_t>(peer)];
    probe.abortWaitRecv();
    probe.waitRecv(kForever);
  }

  void Close() override {
    context_->closeConnections();
    probes_.clear();
  }

 private:
  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::byte probed_{};
  std::vector<std::unique_ptr<Buffer>> probes_;  // [rank] a receive that waits for nothing; own: none
};

}  // namespace

absl::StatusOr<std::unique_ptr<Comm>> ConnectGloo(const RankEnvironment& environment,
                                                  const CommOptions& options) {
  const auto interface = ProcessEnvironment("GLOO_SOCKET_IFNAME");
  return ConnectOver([](const MeshPlace& place) { return std::make_unique<GlooMesh>(place); },
                     interface.has_value() ? absl::StrCat("Gloo (", *interface, ")") : "Gloo", environment,
                     {.comm = options});
}

}  // namespace penstock::zero

#else

namespace penstock::zero {

absl::StatusOr<std::unique_ptr<Comm>> ConnectGloo(const RankEnvironment&, const CommOptions&) {
  return absl::UnimplementedError(
      "more than one rank: this program was built without Gloo (Debian: libgloo-dev)");
}

}  // namespace penstock::zero

#endif

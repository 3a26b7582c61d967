// Ranks over Gloo: one connection to every other rank, messages without copies. LibTorch's TCPStore is where
// they meet, where each leaves a sign of life every second, and where the first that fails writes why.
#include "zero/ranks/comm.h"

#ifdef PENSTOCK_HAVE_GLOO

#include <arpa/inet.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "zero/memory/guarded.h"

namespace penstock::zero {
namespace {

using Clock = std::chrono::steady_clock;
using Buffer = gloo::transport::UnboundBuffer;

// Beyond any patience: what bounds a wait is the other rank's sign of life.
constexpr auto kForever = std::chrono::hours(24 * 30);
constexpr const char* kFailedKey = "failed";
constexpr uint64_t kProbeSlot = uint64_t{kChannels} << 48;  // beyond those of the channels

std::vector<uint8_t> Bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string Text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// This process's connections to so numbered a port of anybody.
std::set<int> SocketsTo(int port) {
  std::set<int> sockets;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_storage peer{};
    socklen_t length = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
    uint16_t theirs = 0;
    if (peer.ss_family == AF_INET) theirs = reinterpret_cast<const sockaddr_in&>(peer).sin_port;
    if (peer.ss_family == AF_INET6) theirs = reinterpret_cast<const sockaddr_in6&>(peer).sin6_port;
    if (theirs != 0 && ntohs(theirs) == port) sockets.insert(fd);
  }
  return sockets;
}

// The meeting point as Gloo wants it.
class GlooStore : public gloo::rendezvous::Store {
 public:
  GlooStore(c10d::TCPStore* store, std::string prefix, std::chrono::milliseconds patience)
      : store_(store), prefix_(std::move(prefix)), patience_(patience) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    store_->set(prefix_ + key, {data.begin(), data.end()});
  }
  std::vector<char> get(const std::string& key) override {
    store_->wait({prefix_ + key}, patience_);
    const std::vector<uint8_t> data = store_->get(prefix_ + key);
    return {data.begin(), data.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, patience_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    std::vector<std::string> prefixed;
    for (const std::string& key : keys) prefixed.push_back(prefix_ + key);
    store_->wait(prefixed, timeout);
  }

 private:
  c10d::TCPStore* const store_;
  const std::string prefix_;
  const std::chrono::milliseconds patience_;
};

// The address under which this host talks to the master, which is the one that other ranks can reach it by.
absl::StatusOr<std::string> OwnAddress(const std::string& master, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(master.c_str(), std::to_string(port).c_str(), &hints, &found);
      error != 0) {
    return absl::UnavailableError(absl::StrCat("MASTER_ADDR=", master, ": ", gai_strerror(error)));
  }
  std::string address;
  for (const addrinfo* each = found; each != nullptr && address.empty(); each = each->ai_next) {
    const int fd = socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    char text[NI_MAXHOST];
    // Nothing is sent: a datagram socket that is connected has only chosen its way.
    if (connect(fd, each->ai_addr, each->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof(text), nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      address = text;
    }
    close(fd);
  }
  freeaddrinfo(found);
  if (address.empty())
    return absl::UnavailableError(absl::StrCat("no way from this host to MASTER_ADDR=", master));
  return address;
}

class GlooComm;

class GlooExchange : public Exchange {
 public:
  explicit GlooExchange(GlooComm* comm) : comm_(comm) {}
  ~GlooExchange() override;
  absl::Status Wait() override;

  GlooComm* const comm_;
  struct Peer {
    int rank;
    std::unique_ptr<Buffer> sends, receives;
  };
  std::vector<Peer> peers_;
};

class GlooComm : public Comm {
 public:
  GlooComm(const RankEnvironment& environment, const CommOptions& options)
      : Comm(environment), options_(options), prefix_(absl::StrCat("penstock/", environment.session, "/")) {}

  ~GlooComm() override {
    bool aborted;
    {
      std::lock_guard lock(mutex_);
      aborted = !failure_.ok();
      closing_ = true;
    }
    if (!aborted && context_ != nullptr) {
      // What others still have to read must not be lost by closing: everybody is done when everybody says so.
      // Who fails now has already been told, or will be by the run.
      std::vector<std::byte> said(static_cast<size_t>(world()));
      (void)AllGather(Channel::kSetup, said.data(), 1);
    }
    stopping_.store(true);
    stop_.notify_all();
    if (beats_.joinable()) beats_.join();
    if (context_ != nullptr) context_->closeConnections();
    probes_.clear();
    Leave();
    left_.store(true);
    stop_.notify_all();
    if (watch_.joinable()) watch_.join();  // the last: all of this may wait for a store that does not answer
  }

  std::string name() const override { return absl::StrCat("Gloo over ", address_); }

  absl::Status Connect() {
    // Gloo and the store throw.
    absl::Status status;
    const absl::Status thrown = Guarded("connecting the ranks", [&] { status = Meet(); });
    status.Update(thrown);
    if (!status.ok()) Abort(status);
    return status;
  }

  absl::StatusOr<std::unique_ptr<Exchange>> Begin(Channel channel, std::span<const void* const> send,
                                                  std::span<void* const> receive, size_t bytes) override {
    auto exchange = std::make_unique<GlooExchange>(this);
    if (bytes == 0) return exchange;
    // Numbered alike on all ranks.
    const auto c = static_cast<size_t>(channel);
    const uint64_t slot = (uint64_t{c} << 48) | (sequence_[c]++ & 0xffffffffffffU);
    int peer = rank();
    try {
      // Each begins with the next one, so that not all send to the same.
      for (int i = 1; i < world(); ++i) {
        peer = (rank() + i) % world();
        const auto k = static_cast<size_t>(peer);
        GlooExchange::Peer& with = exchange->peers_.emplace_back();
        with.rank = peer;
        with.sends = context_->createUnboundBuffer(const_cast<void*>(send[k]), bytes);
        with.receives = context_->createUnboundBuffer(receive[k], bytes);
        if (absl::Status status = Register(with); !status.ok()) return status;
        with.receives->recv(peer, slot, 0, bytes);
        with.sends->send(peer, slot, 0, bytes);
      }
    } catch (const std::exception& error) {
      return Lost(peer, error.what());
    }
    return exchange;
  }

  void Abort(const absl::Status& why) override {
    if (why.ok() || !Stop(why)) return;
    Note(absl::StrCat(RankName(rank(), world()), " failed: ", std::string(why.message())));
  }

  // Every call fails from here on; false where that is so already.
  bool Stop(const absl::Status& why) {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return false;
    failure_ = why;
    for (Buffer* buffer : active_) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
    return true;
  }

  absl::Status failure() override {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  // Rank `peer` cannot be reached any more. What is known of the cause, and from now on everybody's answer.
  absl::Status Lost(int peer, const std::string& what) {
    if (absl::Status failed = failure(); !failed.ok()) return failed;
    const std::string why = FirstLine(what);
    std::string text = absl::StrCat(RankName(peer, world()), " has gone");
    // Gloo's own words help only where the connection was not simply closed.
    if (why.find("closed by peer") == std::string::npos && why.find("reset by peer") == std::string::npos) {
      absl::StrAppend(&text, " (", why.substr(std::min(why.size(), why.find("] ") + 2)), ")");
    }
    return Fail(text);
  }

  // Another rank's failure: the first that anybody wrote down is the cause of the others.
  absl::Status Fail(std::string text) {
    if (const std::string noted = Noted(); !noted.empty()) {
      text = noted;
    } else {
      Note(text);
    }
    (void)Stop(Others(text));
    return failure();
  }

  absl::Status Register(const GlooExchange::Peer& peer) {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
    active_.insert(peer.sends.get());
    active_.insert(peer.receives.get());
    return absl::OkStatus();
  }
  void Deregister(const GlooExchange::Peer& peer) {
    std::lock_guard lock(mutex_);
    active_.erase(peer.sends.get());
    active_.erase(peer.receives.get());
  }

 private:
  static absl::Status Others(const std::string& text) {
    return absl::UnavailableError(
        absl::StrCat(text, "; the last commit of all ranks stands: go on from it with --resume"));
  }

  std::chrono::milliseconds Meeting() const {
    return std::chrono::milliseconds(static_cast<int64_t>(options_.meeting_seconds * 1000));
  }

  // The ranks that have not come, of which `first` is the first: "rank 2 of 3", "ranks 1, 2 of 3".
  std::string Missing(int first) {
    std::vector<int> missing = {first};
    try {
      for (int k = first + 1; k < world(); ++k) {
        if (!store_->check({Key(absl::StrCat("here/", k))})) missing.push_back(k);
      }
    } catch (const std::exception&) {  // rank 0, who keeps the list, has given up: the first is known
    }
    if (missing.size() == 1) return RankName(first, world());
    return absl::StrCat("ranks ", absl::StrJoin(missing, ", "), " of ", world());
  }

  absl::Status Meet() {
    // Gloo writes to connections that another rank may have closed; it looks at what write returns.
    if (struct sigaction now{}; sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL)
      (void)signal(SIGPIPE, SIG_IGN);
    const RankEnvironment& env = environment();
    const int port = env.master_port + (!env.agent_is_master ? 0 : env.master_port < 65535 ? 1 : -1);
    const std::string where = absl::StrCat(env.master_address, ":", port);
    absl::StatusOr<std::string> address = OwnAddress(env.master_address, port);
    if (!address.ok()) return address.status();
    address_ = *address;
    c10d::TCPStoreOptions store_options;
    store_options.port = static_cast<uint16_t>(port);
    store_options.isServer = rank() == 0;
    store_options.waitWorkers = false;
    store_options.timeout = Meeting();
    const std::set<int> others = SocketsTo(port);
    try {
      store_ = std::make_shared<c10d::TCPStore>(env.master_address, store_options);
    } catch (const std::exception& error) {
      const std::string why = FirstLine(error.what());
      return absl::UnavailableError(rank() == 0 ? absl::StrCat("cannot wait for the other ranks at ", where,
                                                               ": ", why, "; another MASTER_PORT may be free")
                                                : absl::StrCat("rank 0 was not there at ", where,
                                                               " (MASTER_ADDR, MASTER_PORT) within ",
                                                               options_.meeting_seconds, " s: ", why));
    }
    for (const int socket : SocketsTo(port)) {
      if (others.count(socket) == 0) store_sockets_.push_back(socket);
    }
    if (store_->add(Key(absl::StrCat("came/", rank())), 1) > 1) {
      return absl::InvalidArgumentError(absl::StrCat("two processes at ", where, " say that they are ",
                                                     RankName(rank(), world()),
                                                     ": each has a RANK of its own"));
    }
    store_->set(Key(absl::StrCat("here/", rank())), Bytes(std::to_string(world())));
    const auto deadline = Clock::now() + Meeting();
    for (int k = 0; k < world(); ++k) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      const std::string key = Key(absl::StrCat("here/", k));
      try {
        store_->wait({key}, std::max(left, std::chrono::milliseconds(1)));
      } catch (const std::exception&) {
        return absl::UnavailableError(
            absl::StrCat(Missing(k), " did not come to ", where, " within ", options_.meeting_seconds, " s"));
      }
      if (const std::string theirs = Text(store_->get(key)); theirs != std::to_string(world())) {
        return absl::InvalidArgumentError(absl::StrCat("rank ", k, " was started as one of ", theirs, ", ",
                                                       RankName(rank(), world()),
                                                       ": all need one WORLD_SIZE"));
      }
    }
    gloo::transport::tcp::attr attributes;
    if (const auto interface = ProcessEnvironment("GLOO_SOCKET_IFNAME"); interface.has_value()) {
      attributes.iface = *interface;
      address_ = *interface;
    } else {
      attributes.hostname = address_;
    }
    std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attributes);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank(), world());
    context->setTimeout(Meeting());
    GlooStore meeting(store_.get(), Key("gloo/"), Meeting());
    context->connectFullMesh(meeting, device);
    context->setTimeout(kForever);
    context_ = std::move(context);
    for (int k = 0; k < world(); ++k) {
      probes_.push_back(k == rank() ? nullptr : context_->createUnboundBuffer(&probed_, 1));
      if (k != rank()) probes_.back()->recv(k, kProbeSlot, 0, 1);
    }
    seen_.assign(static_cast<size_t>(world()), Clock::now());
    answered_ = Clock::now();
    beats_ = std::thread([this] { Beat(); });
    watch_ = std::thread([this] { Watch(); });
    return absl::OkStatus();
  }

  std::string Key(const std::string& name) const { return prefix_ + name; }

  // The store may be gone with its rank: then nothing is known, and nobody is told.
  std::string Noted() {
    try {
      if (store_ == nullptr || !store_->check({Key(kFailedKey)})) return "";
      return Text(store_->get(Key(kFailedKey)));
    } catch (const std::exception&) {
      return "";
    }
  }
  void Note(const std::string& text) {
    try {
      if (store_ != nullptr && !store_->check({Key(kFailedKey)})) store_->set(Key(kFailedKey), Bytes(text));
    } catch (const std::exception&) {
      return;
    }
  }

  std::chrono::milliseconds Patience() const {
    return std::chrono::milliseconds(static_cast<int64_t>(options_.patience_seconds * 1000));
  }
  std::chrono::milliseconds Interval() const {
    return std::min(std::chrono::milliseconds(1000), Patience() / 10);
  }

  // Leaves a sign of life, and looks for those of the others: rank 0 for everybody's, everybody for rank 0's.
  void Beat() {
    std::vector<int64_t> counts(static_cast<size_t>(world()), 0);
    bool store_is_there = true;
    while (!Stopped()) {
      try {
        if (store_is_there) AskStore(&counts);
      } catch (const std::exception&) {
        store_is_there = false;  // it has gone with its rank: the connections tell
      }
      LookForBrokenConnections();
    }
  }

  // Does not return while the store's host does not answer.
  void AskStore(std::vector<int64_t>* counts) {
    store_->add(Key(absl::StrCat("beat/", rank())), 1);
    for (int k = 0; k < (rank() == 0 ? world() : 1); ++k) {
      const int64_t count = store_->add(Key(absl::StrCat("beat/", k)), 0);
      std::lock_guard lock(mutex_);
      if (count != (*counts)[static_cast<size_t>(k)]) seen_[static_cast<size_t>(k)] = Clock::now();
      (*counts)[static_cast<size_t>(k)] = count;
    }
    {
      std::lock_guard lock(mutex_);
      answered_ = Clock::now();
    }
    // Whoever waits for another rank than the one that failed learns of it here.
    if (const std::string noted = Noted(); !noted.empty()) (void)Stop(Others(noted));
  }

  // Apart from it, because the store's own process may be the one that does not answer.
  void Watch() {
    while (!Waited(left_)) {
      int silent = -1;
      bool ending = stopping_.load();
      {
        std::lock_guard lock(mutex_);
        const auto since = Clock::now() - Patience();
        for (int k = 0; rank() == 0 && k < world(); ++k) {
          if (k != rank() && seen_[static_cast<size_t>(k)] < since) silent = k;
        }
        if (rank() != 0 && (answered_ < since || seen_[0] < since)) silent = 0;
        ending = ending || !failure_.ok();
      }
      if (silent < 0 || (ending && (silent > 0 || rank() == 0))) continue;
      if (ending) {  // what this rank has to say is not worth waiting for ever
        ShutStore();
        return;
      }
      const std::string text =
          absl::StrCat(RankName(silent, world()), " has not answered for ", options_.patience_seconds, " s");
      if (silent == 0) {
        // A note would wait for it too, as the beats do, and everybody who asks for notes.
        (void)Stop(Others(text));
        ShutStore();
      } else {
        (void)Fail(text);  // what it says is what every call returns from here on
      }
      return;
    }
  }

  // Gloo tells a broken connection to every receive whose message has not begun, but not to one whose message
  // breaks off in the middle. So one that nobody ever sends to waits beside them: asked to give up, it says
  // at once what it has been told.
  void LookForBrokenConnections() {
    {
      std::lock_guard lock(mutex_);
      if (!failure_.ok() || closing_) return;  // they may end from here on
    }
    for (int k = 0; k < world(); ++k) {
      if (k == rank()) continue;
      Buffer& probe = *probes_[static_cast<size_t>(k)];
      try {
        probe.abortWaitRecv();
        probe.waitRecv(kForever);
      } catch (const std::exception& error) {
        {
          std::lock_guard lock(mutex_);
          if (closing_) return;  // meanwhile
        }
        (void)Lost(k, error.what());  // what every call returns from here on
        return;
      }
    }
  }

  // Whoever waits for the store is told that it is gone.
  void ShutStore() const {
    for (const int socket : store_sockets_) shutdown(socket, SHUT_RDWR);
  }

  bool Stopped() { return Waited(stopping_); }
  bool Waited(const std::atomic<bool>& flag) {
    std::unique_lock lock(stop_mutex_);
    return stop_.wait_for(lock, Interval(), [&flag] { return flag.load(); });
  }

  // Rank 0 keeps the store a little longer after a failure, so that the others can read why.
  void Leave() {
    if (store_ == nullptr) return;
    try {
      store_->add(Key("left"), 1);
      const auto deadline = Clock::now() + std::chrono::seconds(2);
      while (rank() == 0 && !failure().ok() && store_->add(Key("left"), 0) < world() &&
             Clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    } catch (const std::exception&) {
      return;
    }
  }

  const CommOptions options_;
  const std::string prefix_;
  std::string address_;
  std::shared_ptr<c10d::TCPStore> store_;
  std::vector<int> store_sockets_;  // its own; shut where nobody answers on them: c10d waits for ever
  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::byte probed_{};
  std::vector<std::unique_ptr<Buffer>> probes_;  // [rank] a receive that waits for nothing; own: none
  std::array<uint64_t, kChannels> sequence_{};   // by channel, which one thread uses at a time

  std::mutex mutex_;
  absl::Status failure_;      // the first; everything fails with it from then on
  std::set<Buffer*> active_;  // that somebody may be waiting for
  bool closing_ = false;
  std::vector<Clock::time_point> seen_;  // [rank] its last sign of life
  Clock::time_point answered_;           // when the store last did

  std::mutex stop_mutex_;
  std::condition_variable stop_;
  std::atomic<bool> stopping_{false}, left_{false};
  std::thread beats_, watch_;
};

GlooExchange::~GlooExchange() {
  for (const Peer& peer : peers_) comm_->Deregister(peer);
}

absl::Status GlooExchange::Wait() {
  for (const Peer& peer : peers_) {
    try {
      if (!peer.receives->waitRecv(kForever) || !peer.sends->waitSend(kForever)) return comm_->failure();
    } catch (const std::exception& error) {
      return comm_->Lost(peer.rank, error.what());
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Comm>> ConnectGloo(const RankEnvironment& environment,
                                                  const CommOptions& options) {
  auto comm = std::make_unique<GlooComm>(environment, options);
  if (absl::Status status = comm->Connect(); !status.ok()) return status;
  return comm;
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

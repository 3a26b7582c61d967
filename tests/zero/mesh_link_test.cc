// One connection of a mesh, byte by byte: messages between two links, and a peer that sends what no rank
// sends. That one breaks its link, and no memory is touched but that of messages under way.
#include "zero/ranks/mesh_link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/match.h"

namespace penstock::zero::mesh_link_test {
namespace {

std::string AllToSend(MeshLink& link) {
  std::string sent;
  while (link.HasToSend()) {
    size_t bytes = 0;
    for (const iovec& part : link.ToSend()) {
      sent.append(static_cast<const char*>(part.iov_base), part.iov_len);
      bytes += part.iov_len;
    }
    link.Sent(bytes);
  }
  return sent;
}

void Feed(MeshLink& link, std::string_view bytes) {
  while (!bytes.empty() && link.broken().empty()) {
    const std::span<char> place = link.Place();
    const size_t n = std::min(place.size(), bytes.size());
    std::memcpy(place.data(), bytes.data(), n);
    link.Received(n);
    bytes.remove_prefix(n);
  }
}

std::string FrameOf(MeshKind kind, uint64_t number, uint64_t bytes) {
  const MeshFrame frame{.kind = kind, .number = number, .bytes = bytes};
  return {reinterpret_cast<const char*>(&frame), sizeof(frame)};
}

struct Text {
  explicit Text(bool sends, std::string content) : text(std::move(content)) {
    end.sends = sends;
    end.data = text.data();
    end.bytes = text.size();
  }
  std::string text;
  MeshLink::End end;
};

TEST(MeshLink, MessagesArriveWhicheverEndBegins) {
  MeshLink a, b;
  const std::string content(2 * kMeshPieceBytes + 1, 'x');
  Text out(true, content), in(false, std::string(content.size(), '\0')), back(true, "y"), came(false, " ");
  a.Start(&out.end, 1);
  a.Start(&came.end, 2);
  EXPECT_FALSE(out.end.over) << "nobody has asked for it";
  b.Start(&in.end, 1);
  b.Start(&back.end, 2);
  for (int turn = 0; turn < 4; ++turn) {
    Feed(b, AllToSend(a));
    Feed(a, AllToSend(b));
  }
  EXPECT_TRUE(out.end.over && in.end.over && back.end.over && came.end.over);
  EXPECT_EQ(in.text, content);
  EXPECT_EQ(came.text, "y");
  EXPECT_EQ(a.broken() + b.broken(), "");
  EXPECT_TRUE(a.TakeChanged());
  EXPECT_FALSE(a.TakeChanged());
}

// Each request was answered with the bytes that follow what was sent already: behind the message, and of
// memory that was its caller's again.
TEST(MeshLink, AMessageIsSentOnceHoweverOftenItIsAskedFor) {
  for (const size_t between : {0u, 1u}) {  // the second request before the first answer, and after
    MeshLink link;
    Text secret(true, "0123456789");
    link.Start(&secret.end, 5);
    Feed(link, FrameOf(MeshKind::kAsks, 5, 10));
    std::string sent;
    if (between == 1) {
      sent = AllToSend(link);
      EXPECT_TRUE(secret.end.over);
      EXPECT_EQ(sent.size(), sizeof(MeshFrame) + 10);
    }
    Feed(link, FrameOf(MeshKind::kAsks, 5, 10));
    if (between == 0) {
      EXPECT_TRUE(absl::StrContains(link.broken(), "twice")) << link.broken();
    }
    EXPECT_EQ(AllToSend(link), "") << "bytes that are no message's";
    // Once more before it is begun: one of the number is known already.
    if (between == 1) {
      Feed(link, FrameOf(MeshKind::kAsks, 5, 10));
      EXPECT_TRUE(absl::StrContains(link.broken(), "twice")) << link.broken();
    }
  }
}

TEST(MeshLink, WhatIsAskedForInAdvanceIsBounded) {
  MeshLink link;
  for (uint64_t number = 0; number < kMeshMostAsked; ++number)
    Feed(link, FrameOf(MeshKind::kAsks, number, 1));
  EXPECT_EQ(link.broken(), "");
  Feed(link, FrameOf(MeshKind::kAsks, kMeshMostAsked, 1));
  EXPECT_TRUE(absl::StrContains(link.broken(), "ahead")) << link.broken();
}

TEST(MeshLink, WhatNobodyWaitsForBreaksTheLinkAndTouchesNothing) {
  for (const std::string& frame :
       {FrameOf(MeshKind::kPiece, 9, 4), FrameOf(MeshKind::kPiece, 3, 5), FrameOf(MeshKind::kPiece, 3, 0),
        FrameOf(MeshKind::kPiece, 3, UINT64_MAX), FrameOf(static_cast<MeshKind>(77), 3, 4)}) {
    MeshLink link;
    Text in(false, "....");
    link.Start(&in.end, 3);
    Feed(link, frame + "xxxxx");
    EXPECT_NE(link.broken(), "");
    EXPECT_EQ(in.text, "....");
    EXPECT_FALSE(in.end.over);
    link.Drop(&in.end);
  }
  MeshLink link;
  Text in(false, "....");
  link.Start(&in.end, 3);
  Feed(link, FrameOf(MeshKind::kPiece, 3, 3) + "abc" + FrameOf(MeshKind::kPiece, 3, 2) + "de");
  EXPECT_NE(link.broken(), "") << "more than is left";
  EXPECT_EQ(in.text, "abc.");
}

TEST(MeshLink, AnotherSizeBreaksTheLink) {
  MeshLink link;
  Text out(true, "1234");
  Feed(link, FrameOf(MeshKind::kAsks, 3, 5));
  link.Start(&out.end, 3);
  EXPECT_TRUE(absl::StrContains(link.broken(), "5 bytes are waited for where 4 are sent")) << link.broken();
  EXPECT_FALSE(link.HasToSend());
}

TEST(MeshLink, WhatWasDroppedIsTouchedNoMore) {
  MeshLink link;
  Text out(true, "1234"), in(false, "....");
  link.Start(&out.end, 1);
  link.Start(&in.end, 2);
  Feed(link, FrameOf(MeshKind::kAsks, 1, 4));
  Feed(link, FrameOf(MeshKind::kPiece, 2, 4) + "ab");
  link.Drop(&in.end);
  EXPECT_NE(link.broken(), "") << "it was in the middle of it";
  EXPECT_FALSE(link.HasToSend());
  link.Drop(&out.end);
  EXPECT_EQ(in.text, "ab..");
}

}  // namespace
}  // namespace penstock::zero::mesh_link_test

// Reordered sequences over a library that forks and drops one by one.
#include <span>
#include <vector>

#include "tests/client/step/step_fixture.h"

namespace pqcached::testing {
namespace {

class ReorderTest : public StepTest {
 protected:
  uint32_t Count() { return sidecar_.store->ListCaches(kTestTenant).at(0).sequence_count; }
};

TEST_F(ReorderTest, AForkThatFailsIsNamedAndTakesTheOthersBack) {
  const Layer layer(310, 1);
  std::vector<Sequence> beams;
  beams.push_back(Fill(layer, 300));
  beams.push_back(Fill(layer, 200));
  ASSERT_TRUE(sidecar_.store->DropSequence(kTestTenant, beams[1].id()).ok());
  const uint64_t kept = beams[0].id(), lost = beams[1].id();
  Expect(Sequence::Reorder(&beams, std::vector<uint32_t>{0, 0, 1, 1}), PQC_NOT_FOUND, "from[3]");
  EXPECT_EQ(Count(), 1u);
  ASSERT_EQ(beams.size(), 2u);
  EXPECT_EQ(beams[0].id(), kept);
  EXPECT_EQ(beams[1].id(), lost);
  MustBeOk(Sequence::Reorder(&beams, std::vector<uint32_t>{0, 0, 0}));
  EXPECT_EQ(Count(), 3u);
  for (Sequence& beam : beams) MustBeOk(Decode(beam, layer, 300));
}

}  // namespace
}  // namespace pqcached::testing

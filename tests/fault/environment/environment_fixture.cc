#include "environment_fixture.h"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace pqcached::testing {

ScopedVariable::ScopedVariable(std::string name, const std::string& value)
    : name_(std::move(name)) {
  setenv(name_.c_str(), value.c_str(), /*overwrite=*/1);
}

ScopedVariable::~ScopedVariable() { unsetenv(name_.c_str()); }

void EnvironmentTest::Start(std::vector<std::string> flags) {
  flags.insert(flags.begin(), {"--log-file", log_path(), "--max-pool-bytes", "1gib"});
  daemon_ = std::make_unique<Daemon>(flags);
  try {
    daemon_->AwaitServing();
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + "\n" + Log());
  }
}

void EnvironmentTest::Stop() {
  engines_.clear();
  daemon_.reset();
}

std::string EnvironmentTest::LogOf(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

bool EnvironmentTest::AwaitLog(const std::string& words, size_t from) const {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (std::chrono::steady_clock::now() < until) {
    const std::string log = Log();
    if (log.size() > from && log.find(words, from) != std::string::npos) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

Engine::Options EnvironmentTest::NextOptions(pqc_path_choice path) {
  ++made_;
  return {.endpoint = daemon_->endpoint(),
          .path = path,
          .seed = made_,
          .cache_name = "cache " + std::to_string(made_)};
}

Engine* EnvironmentTest::TryEngine(pqc_path_choice path) {
  auto engine = std::make_unique<Engine>(NextOptions(path));
  if (!engine->has_cache()) {
    ended_ += engine->counts();
    return nullptr;
  }
  engines_.push_back(std::move(engine));
  return engines_.back().get();
}

Engine& EnvironmentTest::AddEngine(pqc_path_choice path) {
  Engine* const engine = TryEngine(path);
  if (engine == nullptr) throw std::runtime_error("there is no memory for an engine:\n" + Log());
  for (int i = 0; i < 20; ++i) engine->Act();
  return *engine;
}

void EnvironmentTest::Act(int operations) {
  for (int i = 0; i < operations; ++i) {
    for (const auto& engine : engines_) engine->Act();
  }
}

void EnvironmentTest::Verify() {
  for (const auto& engine : engines_) engine->Verify();
}

uint64_t EnvironmentTest::refusals() const {
  uint64_t refusals = ended_.refusals;
  for (const auto& engine : engines_) refusals += engine->counts().refusals;
  return refusals;
}

Engine::Counts EnvironmentTest::EndEngines() {
  for (const auto& engine : engines_) ended_ += engine->counts();
  engines_.clear();
  return std::exchange(ended_, {});
}

void EnvironmentTest::ExpectServes() {
  Verify();
  const uint64_t before = refusals();
  AddEngine();
  Act(20);
  Verify();
  EXPECT_EQ(refusals(), before) << "calls are refused after the end of the fault";
}

void EnvironmentTest::Survived(Fault fault, const std::string& log) {
  Verify();
  const Engine::Counts counts = EndEngines();
  EXPECT_TRUE(counts.clean()) << counts.ToString();
  Client admin = daemon_->OpenClient("default", PQC_PATH_ONLY_REMOTE);
  const Left left = AwaitNothingLeft(admin, 1);
  EXPECT_TRUE(left.nothing_but(1)) << left.ToString();
  const FaultRow& row = RowOf(fault);
  const auto* const test = ::testing::UnitTest::GetInstance()->current_test_info();
  EXPECT_EQ(row.test, std::string(test->test_suite_name()) + "." + test->name());
  for (const std::string& event : row.events) {
    EXPECT_NE(log.find("event=" + event + " "), std::string::npos) << event << " is not in\n"
                                                                   << log;
  }
  Record("environment_faults_survived", 1, counts, left);
}

}  // namespace pqcached::testing

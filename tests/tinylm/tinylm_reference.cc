// tinylm_reference: checks the engine against all reference files and prints the result as JSON.
//
//   tinylm_reference --model DIR --prompts DIR --references DIR [--lengths 1024,4096,8192,16384]

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/tinylm/reference.h"

namespace {

using nlohmann::json;

int Run(int argc, char** argv) {
  std::string model_directory, prompts, references, lengths = "1024,4096,8192,16384";
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    std::string* const value = flag == "--model"        ? &model_directory
                               : flag == "--prompts"    ? &prompts
                               : flag == "--references" ? &references
                               : flag == "--lengths"    ? &lengths
                                                        : nullptr;
    if (!value || i + 1 == argc) {
      std::fprintf(stderr, "usage: %s --model DIR --prompts DIR --references DIR [--lengths N,N]\n",
                   argv[0]);
      return EXIT_FAILURE;
    }
    *value = argv[i + 1];
  }

  const tinylm::Model model = tinylm::LoadModel(model_directory);
  tinylm::Workers workers;
  tinylm::Engine engine(model, workers);
  tinylm::FullAttention attention(model.config, workers);
  tinylm::ReferenceComparison total;
  std::istringstream list(lengths);
  for (std::string length; std::getline(list, length, ',');) {
    for (const char* task : {"niah", "kv", "mq", "var", "freq"}) {
      total.Add(tinylm::CompareWithReference(engine, attention, prompts, references, task,
                                             static_cast<uint32_t>(std::stoul(length))));
    }
  }
  if (total.question_count == 0) throw std::runtime_error("no reference was found");

  json mismatches = json::array();
  for (const auto& mismatch : total.mismatches) {
    mismatches.push_back({{"where", mismatch.where},
                          {"expected", mismatch.expected},
                          {"actual", mismatch.actual},
                          {"logit_margin", mismatch.margin},
                          {"near_tie", mismatch.is_near_tie}});
  }
  std::cout << json{{"tinylm_logit_max_abs_error", total.logit_max_abs_error},
                    {"logits", total.logit_count},
                    {"tinylm_greedy_match",
                     static_cast<double>(total.match_count) / total.question_count},
                    {"questions", total.question_count},
                    {"mismatches", mismatches}}
                   .dump(1)
            << "\n";
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tinylm_reference: %s\n", error.what());
    return EXIT_FAILURE;
  }
}

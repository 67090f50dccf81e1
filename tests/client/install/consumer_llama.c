/* An application of llama.cpp: finds the header and the library. Without llama.cpp nothing is opened. */
#include <pqcached/status.h>
#include <pqcached_llama.h>
#include <stdio.h>

int main(void) {
  pqc_llama_options options = PQC_INIT(pqc_llama_options);
  options.endpoint = "unix:///nowhere";
  options.model_name = "model";
  pqc_llama_cache* cache = NULL;
  const struct llama_model* model = (const struct llama_model*)&options; /* never read */
  const pqc_status status = pqc_llama_cache_open(model, &options, &cache);
  printf("%s: %s\n", pqc_status_name(status), pqc_llama_last_error());
  return status == PQC_FAILED_PRECONDITION && cache == NULL ? 0 : 1;
}

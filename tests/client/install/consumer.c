/* An engine in C: prints why it cannot open a client where nobody listens. */
#include <stdio.h>

#include "pqcached/client.h"

int main(int argc, char** argv) {
  pqc_client_options options = PQC_INIT(pqc_client_options);
  pqc_client* client = NULL;
  options.endpoint = argc > 1 ? argv[1] : "unix:///nonexistent";
  const pqc_status status = pqc_client_open(&options, &client);
  printf("%s: %s\n", pqc_status_name(status), pqc_last_error());
  pqc_client_close(client);
  return status == PQC_UNAVAILABLE ? 0 : 1;
}

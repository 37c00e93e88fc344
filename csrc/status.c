/* status.c - the thread-local message behind bsh_status. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char message[512];

bsh_status bsh_fail(const bsh_status code, const char *const format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return code;
}

const char *bsh_status_message(void) { return message; }

/* Rules that say which call of which process fails, and how; shared by all processes of a lab. */
#ifndef RULES_H
#define RULES_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_RULES = 64, MAX_TEXT = 4096 };

/* The file `state` of a lab, mapped by all of its processes. */
struct shared {
    uint64_t generation;        /* of the file `rules`: read again when this changes */
    uint64_t order;             /* of the newest record */
    uint64_t counts[MAX_RULES]; /* matching calls of each rule, over all processes */
    pthread_mutex_t lock;       /* held while a recorded call is made */
};

struct outcome {
    int error;       /* the call fails with this errno, or 0 */
    bool is_short;   /* a write takes part of what it is given only */
    size_t limit;    /* how much; 0 for half of it */
    bool kills;      /* the process ends after the call */
    int exit_code;   /* by this code, or by SIGKILL if negative */
};

/* Return the shared state, or NULL if this process belongs to no lab. */
struct shared *lab(void);
/* Say what is to happen to a call; the caller's process may end in here. */
struct outcome outcome_of(const char *group, const char *name, const char *path, const char *other);
/* Tell whether changes of a file are recorded, and whether a sync reaches the disk. */
bool is_recorded(const char *path);
bool syncs(void);
bool watches(const char *group, const char *name);
void end_process(int exit_code);
int lab_file(const char *name, int flags);

#endif

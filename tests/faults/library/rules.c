/* Reading the rules and deciding about one call.
 *
 * FAULT_LAB names a directory with the files `state` (struct shared), `rules` and `hits`. A line of
 * `rules` is one of
 *     record root=/a/directory [sync=skip]
 *     fault calls=write,fsync path=*.sqlite-wal process=runner-* rank=2 nth=3 count=1 fail=ENOSPC
 * Keys of a fault: calls (groups or names, or "any"), path, process ("name argument ..."; both are
 * globs), rank (the variable RANK), nth (first matching call that it hits, from 1), count (how many
 * it hits, 0 for all), chance and seed (each matching call by chance instead), and what happens:
 * fail=ERROR, short=BYTES (0: half), delay=MILLISECONDS, kill=before|after|torn, exit=CODE.
 */
#define _GNU_SOURCE
#include "rules.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct rule {
    char calls[128], path[512], process[256], rank[16];
    uint64_t nth, count, seed;
    double chance; /* negative: by number */
    int error, delay_ms, exit_code;
    long limit; /* negative: whole */
    enum { STAYS, BEFORE, AFTER, TORN } end;
};

struct table {
    uint64_t generation;
    int num_rules;
    struct rule rules[MAX_RULES];
    char root[1024];
    bool skips_sync;
};

static struct shared *shared;
static char directory[512];
static struct table tables[2];
static struct table *volatile current = &tables[0];
static int is_reading;
static int is_set_up;

static const struct { const char *name; int number; } ERRORS[] = {
    {"EIO", EIO}, {"ENOSPC", ENOSPC}, {"EMFILE", EMFILE}, {"ENOMEM", ENOMEM}, {"EDQUOT", EDQUOT},
    {"EAGAIN", EAGAIN}, {"EACCES", EACCES}, {"EROFS", EROFS}, {"EINTR", EINTR}, {"ENFILE", ENFILE},
    {"ECONNREFUSED", ECONNREFUSED}, {"ETIMEDOUT", ETIMEDOUT}, {"ENOLCK", ENOLCK},
};

int lab_file(const char *name, int flags) {
    char path[640];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0600);
}

/* Called once by whoever makes a lab. */
int fault_lab_prepare(const char *path) {
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct shared)) < 0) return -1;
    struct shared *made = mmap(NULL, sizeof *made, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (made == MAP_FAILED) return -1;
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    return pthread_mutex_init(&made->lock, &kind) || munmap(made, sizeof *made) ? -1 : 0;
}

static void set_up(void) {
    const char *given = getenv("FAULT_LAB");
    if (given != NULL && strlen(given) < sizeof directory) {
        strcpy(directory, given);
        int file = lab_file("state", O_RDWR);
        if (file >= 0) {
            void *found = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            if (found != MAP_FAILED) shared = found;
            syscall(SYS_close, file);
        }
    }
    __atomic_store_n(&is_set_up, 2, __ATOMIC_RELEASE);
}

struct shared *lab(void) {
    int unset = 0;
    if (__atomic_load_n(&is_set_up, __ATOMIC_ACQUIRE) == 2) return shared;
    if (__atomic_compare_exchange_n(&is_set_up, &unset, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) set_up();
    return __atomic_load_n(&is_set_up, __ATOMIC_ACQUIRE) == 2 ? shared : NULL;
}

static int error_named(const char *name) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (strcmp(ERRORS[i].name, name) == 0) return ERRORS[i].number;
    return EIO;
}

static void take(char *target, size_t size, const char *value) { snprintf(target, size, "%s", value); }

static void read_key(struct table *table, struct rule *rule, const char *key, const char *value) {
    if (!strcmp(key, "root")) take(table->root, sizeof table->root, value);
    else if (!strcmp(key, "sync")) table->skips_sync = !strcmp(value, "skip");
    else if (!strcmp(key, "calls")) take(rule->calls, sizeof rule->calls, value);
    else if (!strcmp(key, "path")) take(rule->path, sizeof rule->path, value);
    else if (!strcmp(key, "process")) take(rule->process, sizeof rule->process, value);
    else if (!strcmp(key, "rank")) take(rule->rank, sizeof rule->rank, value);
    else if (!strcmp(key, "nth")) rule->nth = strtoull(value, NULL, 10);
    else if (!strcmp(key, "count")) rule->count = strtoull(value, NULL, 10);
    else if (!strcmp(key, "seed")) rule->seed = strtoull(value, NULL, 10);
    else if (!strcmp(key, "chance")) rule->chance = strtod(value, NULL);
    else if (!strcmp(key, "fail")) rule->error = error_named(value);
    else if (!strcmp(key, "short")) rule->limit = strtol(value, NULL, 10);
    else if (!strcmp(key, "delay")) rule->delay_ms = atoi(value);
    else if (!strcmp(key, "exit")) rule->exit_code = atoi(value), rule->end = BEFORE;
    else if (!strcmp(key, "kill"))
        rule->end = !strcmp(value, "after") ? AFTER : !strcmp(value, "torn") ? TORN : BEFORE;
}

static void read_line(struct table *table, char *line) {
    struct rule unused, *rule = &unused;
    char *rest = NULL, *word = strtok_r(line, " ", &rest);
    if (word == NULL || *word == '#') return;
    bool is_fault = !strcmp(word, "fault");
    if (is_fault && table->num_rules < MAX_RULES) rule = &table->rules[table->num_rules++];
    *rule = (struct rule){.nth = 1, .count = 1, .chance = -1, .limit = -1, .exit_code = -1};
    while ((word = strtok_r(NULL, " ", &rest)) != NULL) {
        char *value = strchr(word, '=');
        if (value == NULL) continue;
        *value = '\0';
        /* A blank in a pattern is written as "?", which matches it. */
        read_key(table, rule, word, value + 1);
    }
}

static void read_rules(uint64_t generation) {
    static char text[65536];
    struct table *next = current == &tables[0] ? &tables[1] : &tables[0];
    memset(next, 0, sizeof *next);
    int file = lab_file("rules", O_RDONLY);
    ssize_t size = file < 0 ? 0 : syscall(SYS_read, file, text, sizeof text - 1);
    if (file >= 0) syscall(SYS_close, file);
    text[size > 0 ? size : 0] = '\0';
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        read_line(next, line);
    next->generation = generation;
    current = next;
}

static struct table *rules_now(void) {
    uint64_t generation = __atomic_load_n(&shared->generation, __ATOMIC_ACQUIRE);
    if (current->generation != generation) {
        /* In a child that was forked meanwhile, the rules of before stay. */
        if (!__atomic_exchange_n(&is_reading, 1, __ATOMIC_ACQUIRE)) {
            if (current->generation != generation) read_rules(generation);
            __atomic_store_n(&is_reading, 0, __ATOMIC_RELEASE);
        }
    }
    return current;
}

static bool has_word(const char *list, const char *word) {
    size_t length = strlen(word);
    for (const char *at = list; (at = strstr(at, word)) != NULL; at += length)
        if ((at == list || at[-1] == ',') && (at[length] == ',' || at[length] == '\0')) return true;
    return false;
}

static bool is_this_process(const char *pattern) {
    char text[2048];
    size_t used = 0;
    for (int i = 0; i < 2; i++) {
        int file = syscall(SYS_openat, AT_FDCWD, i ? "/proc/self/cmdline" : "/proc/self/comm", O_RDONLY | O_CLOEXEC, 0);
        if (file < 0) continue;
        ssize_t size = syscall(SYS_read, file, text + used, sizeof text - 1 - used);
        syscall(SYS_close, file);
        used += size > 0 ? size : 0;
    }
    for (size_t i = 0; i < used; i++)
        if (text[i] == '\0' || text[i] == '\n') text[i] = ' ';
    while (used && text[used - 1] == ' ') used--;
    text[used] = '\0';
    return fnmatch(pattern, text, 0) == 0;
}

static bool matches(const struct rule *rule, const char *group, const char *name, const char *path, const char *other) {
    if (strcmp(rule->calls, "any") && !has_word(rule->calls, group) && !has_word(rule->calls, name)) return false;
    if (*rule->path && (path == NULL || fnmatch(rule->path, path, 0)) && (other == NULL || fnmatch(rule->path, other, 0)))
        return false;
    const char *rank = getenv("RANK");
    if (*rule->rank && (rank == NULL || strcmp(rank, rule->rank))) return false;
    return !*rule->process || is_this_process(rule->process);
}

static bool is_hit(const struct rule *rule, int index) {
    uint64_t number = 1 + __atomic_fetch_add(&shared->counts[index], 1, __ATOMIC_ACQ_REL);
    if (rule->chance < 0) return number >= rule->nth && (rule->count == 0 || number < rule->nth + rule->count);
    /* splitmix64 of seed and number */
    uint64_t x = rule->seed * 0x9E3779B97F4A7C15ull + number * 0xD1B54A32D192ED03ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return (double)((x ^ (x >> 31)) >> 11) / 9007199254740992.0 < rule->chance;
}

static void note_hit(int index, const char *name, const char *path) {
    char line[MAX_TEXT];
    int file = lab_file("hits", O_WRONLY | O_APPEND | O_CREAT);
    int size = snprintf(line, sizeof line, "%d %s %d %s\n", index, name, (int)getpid(), path ? path : "-");
    if (file < 0) return;
    syscall(SYS_write, file, line, size < (int)sizeof line ? size : (int)sizeof line - 1);
    syscall(SYS_close, file);
}

void end_process(int exit_code) {
    if (exit_code >= 0) _exit(exit_code);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

struct outcome outcome_of(const char *group, const char *name, const char *path, const char *other) {
    struct outcome found = {.exit_code = -1};
    struct table *table = rules_now();
    for (int i = 0; i < table->num_rules; i++) {
        const struct rule *rule = &table->rules[i];
        if (!matches(rule, group, name, path, other) || !is_hit(rule, i)) continue;
        note_hit(i, name, path);
        if (rule->delay_ms) {
            struct timespec time = {rule->delay_ms / 1000, rule->delay_ms % 1000 * 1000000L};
            syscall(SYS_nanosleep, &time, NULL);
        }
        if (rule->end == BEFORE) end_process(rule->exit_code);
        if (rule->error) found.error = rule->error;
        if (rule->limit >= 0 || rule->end == TORN) found.is_short = true, found.limit = rule->limit > 0 ? rule->limit : 0;
        found.kills |= rule->end == AFTER || rule->end == TORN;
    }
    return found;
}

bool watches(const char *group, const char *name) {
    struct table *table = rules_now();
    for (int i = 0; i < table->num_rules; i++) {
        const char *calls = table->rules[i].calls;
        if (!strcmp(calls, "any") || has_word(calls, group) || has_word(calls, name)) return true;
    }
    return *table->root != '\0';
}

bool is_recorded(const char *path) {
    const char *root = rules_now()->root;
    size_t length = strlen(root);
    return length && path && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

bool syncs(void) { return !current->skips_sync; }

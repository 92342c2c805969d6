/* A library in place of NVIDIA's: what FAKE_NVML says is on the machine.

   "whole": two GPUs, MIG off on the first, not supported by the second, which tells no memory.
   "mig": a GPU of two MIG devices, numbered 0 and 2, and a whole one. "empty": MIG without devices.
   "lost": the first of three GPUs has fallen off the bus. "refuse": does not start. "none": there is
   no driver. "hang": never answers. "noise": prints a text itself. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, MISMATCH = 18 };

typedef struct { const char *name, *uuid; unsigned long long total; } device;
typedef struct { unsigned long long total, free, used; } memory;

static device gpus[] = {
    {"NVIDIA H100 80GB HBM3", "GPU-aaaa0000", 85520809984ULL},
    {"NVIDIA H100 80GB HBM3", "GPU-bbbb1111", 85520809984ULL},
    {"NVIDIA T4", "GPU-cccc2222", 16106127360ULL},
};
static device parts[] = {
    {"NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG-dddd3333", 42144366592ULL},
    {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-eeee4444", 10468982784ULL},
};

static int is(const char *what) {
    const char *chosen = getenv("FAKE_NVML");
    return chosen != NULL && strcmp(chosen, what) == 0;
}

const char *nvmlErrorString(int code) {
    return code == MISMATCH ? "Driver/library version mismatch" : code == GPU_IS_LOST ? "GPU is lost" : "Error";
}

int nvmlInitWithFlags(unsigned flags) {
    while (is("hang")) pause();
    if (is("noise")) puts("a text of the driver");
    return is("refuse") ? MISMATCH : is("none") ? DRIVER_NOT_LOADED : SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = is("lost") ? 3 : 2;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **found) {
    *found = &gpus[index];
    return is("lost") && index == 0 ? GPU_IS_LOST : SUCCESS;
}

static int copy(char *text, unsigned length, const char *from) {
    strncpy(text, from, length);
    return SUCCESS;
}

int nvmlDeviceGetUUID(device *one, char *text, unsigned length) { return copy(text, length, one->uuid); }
int nvmlDeviceGetName(device *one, char *text, unsigned length) { return copy(text, length, one->name); }

int nvmlDeviceGetMemoryInfo(device *one, memory *found) {
    if (is("whole") && one == &gpus[1]) return NOT_SUPPORTED;
    found->total = one->total;
    found->used = one->total / 4;
    found->free = one->total - found->used;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(device *one, unsigned *current, unsigned *pending) {
    if (one != &gpus[0]) return NOT_SUPPORTED;
    *current = *pending = is("mig") || is("empty");
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device *one, unsigned *count) {
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device *one, unsigned index, device **found) {
    if (is("empty") || (index != 0 && index != 2)) return NOT_FOUND;
    *found = &parts[index / 2];
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(device *one, unsigned *found) {
    found[0] = 40;
    found[1] = 10;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(device *one, unsigned *milliwatts) {
    *milliwatts = 71500;
    return SUCCESS;
}

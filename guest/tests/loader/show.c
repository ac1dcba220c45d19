// Prints how it was started, in a form that does not depend on where things are in memory.
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

extern char **environ;
extern const Elf64_Ehdr __ehdr_start __attribute__((weak, visibility("hidden")));
extern void _start(void) __attribute__((visibility("hidden")));

static char zero[100000];
static int initialised[3] = {1, 2, 3};
static _Thread_local int thread_local = 17;

static void number(const char *name, uint64_t value) { printf("%s %#lx\n", name, (unsigned long)value); }

int main(int argc, char **argv) {
    printf("argc %d\n", argc);
    for (int i = 0; i < argc; i++) printf("argv[%d] \"%s\"\n", i, argv[i]);
    printf("argv ends with %p, environment follows %d\n", (void *)argv[argc], argv + argc + 1 == environ);
    number("argc precedes argv", ((uint64_t *)argv)[-1]);
    number("argc address mod 16", ((uint64_t)argv - 8) % 16);
    char **entry = environ;
    for (; *entry; entry++) printf("environment \"%s\"\n", *entry);

    Elf64_auxv_t *aux = (Elf64_auxv_t *)(entry + 1);
    const char *file_name = "", *platform = "", *random = "";
    for (; aux->a_type != AT_NULL; aux++) {
        uint64_t value = aux->a_un.a_val;
        char name[30];
        snprintf(name, sizeof name, "aux %lu", (unsigned long)aux->a_type);
        switch (aux->a_type) {
        case 27: case 28: break; // rseq: left out by the translator on purpose
        case AT_SYSINFO_EHDR: printf("%s starts with \"%.3s\"\n", name, (char *)value + 1); break;
        case AT_PHDR: {
            int found = 0;
            const Elf64_Phdr *headers = (const Elf64_Phdr *)value;
            for (unsigned i = 0; i < __ehdr_start.e_phnum; i++) found += headers[i].p_type == PT_LOAD;
            printf("%s %d, %d segments\n", name, value == (uint64_t)&__ehdr_start + __ehdr_start.e_phoff, found);
            break;
        }
        case AT_BASE: printf("%s page-aligned %d, \"%.3s\"\n", name, value % 4096 == 0, value ? (char *)value + 1 : ""); break;
        case AT_ENTRY: printf("%s is _start %d\n", name, value == (uint64_t)_start); break;
        case AT_EXECFN: file_name = (const char *)value; printf("%s \"%s\"\n", name, file_name); break;
        case AT_PLATFORM: platform = (const char *)value; printf("%s \"%s\"\n", name, platform); break;
        case AT_RANDOM: random = (const char *)value; printf("%s present\n", name); break;
        default: number(name, value);
        }
    }
    uint64_t file_name_end = (uint64_t)file_name + strlen(file_name) + 1;
    number("above the file name", 4096 - file_name_end % 4096);
    uint64_t above = 0;
    memcpy(&above, (void *)file_name_end, 8);
    number("which is", above);
    printf("order %d %d %d %d\n", (char *)argv < random, random + 16 == platform, platform < argv[0],
           argv[argc - 1] < file_name);

    int sum = 0;
    for (unsigned i = 0; i < sizeof zero; i++) sum += zero[i];
    zero[sizeof zero - 1] = 1;
    printf("bss %d data %d%d%d tls %d\n", sum, initialised[0], initialised[1], initialised[2], thread_local);
    char *old = sbrk(100000);
    memset(old, 1, 100000);
    printf("sbrk %d\n", (char *)sbrk(0) - old == 100000);
    fflush(stdout);
    return 42;
}

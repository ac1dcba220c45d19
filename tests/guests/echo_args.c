/* What a program sees at its start: argv, environment, auxiliary vector, its own name, limits.
 *
 * Hard for a translator: /proc and the kernel describe the translator's process, not the guest. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <unistd.h>
#include "guest.h"

extern char **environ;
extern char __executable_start;

static size_t slurp(const char *path, void *to, size_t size) {
    FILE *f = fopen(path, "r");
    CHECK(f);
    size_t length = fread(to, 1, size, f);
    fclose(f);
    return length;
}

int main(int argc, char **argv) {
    printf("argc %d\n", argc);
    for (int i = 0; i < argc; i++) printf("argv[%d] = \"%s\"\n", i, argv[i]);
    CHECK(argv[argc] == NULL);
    for (char **e = environ; *e; e++) printf("%s\n", *e);
    printf("invocation name %s\n", program_invocation_short_name);
    printf("page size %lu, clock ticks %lu, secure %lu\n", getauxval(AT_PAGESZ), getauxval(AT_CLKTCK), getauxval(AT_SECURE));
    printf("execfn \"%s\"\n", (const char *)getauxval(AT_EXECFN));
    printf("platform \"%s\"\n", (const char *)getauxval(AT_PLATFORM));
    printf("uids agree %d\n", getauxval(AT_UID) == getuid() && getauxval(AT_EGID) == getegid());
    CHECK(getauxval(AT_RANDOM) != 0);
    const ElfW(Ehdr) *header = (const ElfW(Ehdr) *)&__executable_start;
    CHECK(memcmp(header->e_ident, ELFMAG, SELFMAG) == 0);
    CHECK(getauxval(AT_PHDR) == (uintptr_t)header + header->e_phoff);
    CHECK(getauxval(AT_PHNUM) == header->e_phnum && getauxval(AT_PHENT) == sizeof(ElfW(Phdr)));
    uintptr_t entry = header->e_entry + (header->e_type == ET_DYN ? (uintptr_t)header : 0);
    CHECK(getauxval(AT_ENTRY) == entry);
    char path[4096] = "";
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    CHECK(n > 0);
    char *resolved = realpath(argv[0], NULL);
    printf("/proc/self/exe is argv[0]: %d\n", resolved && strcmp(resolved, path) == 0);
    int fd = open("/proc/self/exe", O_RDONLY);
    unsigned char ident[20];
    CHECK(fd >= 0 && read(fd, ident, 20) == 20);
    printf("it is an ELF file of type %d\n", ident[16]);
    printf("first free descriptor %d\n", fd);
    close(fd);
    char name[16] = "";
    prctl(PR_GET_NAME, name);
    printf("task name \"%s\"\n", name);
    /* What the system shows of the process to others. */
    static char line[8192];
    size_t length = slurp("/proc/self/cmdline", line, sizeof line);
    char *at = line;
    for (int i = 0; i < argc; at += strlen(argv[i++]) + 1) CHECK(at < line + length && strcmp(at, argv[i]) == 0);
    CHECK(at == line + length);
    length = slurp("/proc/self/environ", at = line, sizeof line);
    for (char **e = environ; *e; at += strlen(*e++) + 1) CHECK(at < line + length && strcmp(at, *e) == 0);
    CHECK(at == line + length);
    static ElfW(auxv_t) vector[64];
    CHECK(slurp("/proc/self/auxv", vector, sizeof vector) > 0);
    int same = 0;
    for (ElfW(auxv_t) *v = vector; v->a_type != AT_NULL; v++)
        if (v->a_type == AT_ENTRY || v->a_type == AT_PHDR || v->a_type == AT_RANDOM || v->a_type == AT_EXECFN)
            same += getauxval(v->a_type) == v->a_un.a_val;
    CHECK(same == 4);
    printf("getcwd \"%s\"\n", getcwd(path, sizeof path));
    return argc;
}

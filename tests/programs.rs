//! Real programs of a Debian system, among them threaded ones and just-in-time compilers. Each must
//! behave as natively in all tiers (large ones in `copy` and `full`); quick ones under random
//! deoptimisation, too. The files that they leave are compared.
//!
//! ```text
//! cargo test --test programs gcc -- --exact --nocapture   one test, with the time of each mode
//! cargo test --test programs -- --ignored                 under selections of passes (hours);
//!                                                         large programs in `full`
//! DYNASOUR_ONLY=perl,git cargo test --test programs -- --ignored      only these
//! ```
//!
//! A program that is not installed is skipped with a message; with `DYNASOUR_REQUIRE_PROGRAMS=1`,
//! as in CI, it is a failure.

use dynasour_testkit::Lab;
use dynasour_testkit::mode::Mode;
use dynasour_testkit::program::{Program, Speed, Verdict, run};
use dynasour_testkit::selection;

fn check(program: &Program, modes: &[Mode]) {
    let lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    match lab.compare_program(program, modes) {
        Ok(Verdict::Same) => {}
        Ok(Verdict::Skipped(reason)) => eprintln!("SKIPPED {reason}"),
        Err(report) => panic!("\n{report}\n"),
    }
}

macro_rules! programs {
    ($(
        $name:ident: $kind:ident($packages:literal) $([$($ignored:literal),*])?
            { $($words:expr $(, < $input:literal)? $(, $how:ident)?;)* }
    )*) => {
        mod list {
            use super::*;
            $(
                #[allow(non_upper_case_globals, reason = "named as its test")]
                pub const $name: Program =
                    Program::$kind(
                        stringify!($name),
                        $packages,
                        &[$(run(&$words)$(.input($input))?$(.$how())?,)*],
                    )
                        $(.ignore(&[$($ignored),*]))?;
            )*
            pub const ALL: &[Program] = &[$($name),*];
        }
        $(
            #[test]
            fn $name() {
                check(&list::$name, &list::$name.speed.modes());
            }
        )*
    };
}

/// Runs the programs of these speeds under every selection of optimiser passes.
fn select(tier: &'static str, speeds: &[Speed]) {
    let traces = selection::Traces { tier, threshold: 50 };
    let lab = Lab::new(env!("CARGO_BIN_EXE_dynasour"), env!("CARGO_TARGET_TMPDIR"));
    let only = std::env::var("DYNASOUR_ONLY").ok();
    let wanted = |name| only.as_deref().is_none_or(|only| only.split(',').any(|one| one == name));
    let programs =
        list::ALL.iter().filter(|program| speeds.contains(&program.speed) && wanted(program.name));
    let reports: Vec<String> = programs
        .filter_map(|program| {
            let modes =
                selection::fixed(traces).into_iter().chain(selection::random(program.name, traces));
            let report = lab.compare_program(program, &modes.collect::<Vec<_>>()).err();
            println!("{}: {}", program.name, report.as_deref().unwrap_or("as natively"));
            report
        })
        .collect();
    assert!(reports.is_empty(), "\n{}\n", reports.join("\n\n"));
}

#[test]
#[ignore = "takes a quarter of an hour"]
fn selections_of_quick_programs() {
    select("dynamo", &[Speed::Quick]);
}

/// Large programs run in `full`: interpreting their code would take a day.
#[test]
#[ignore = "takes an hour"]
fn selections_of_other_programs() {
    select("full", &[Speed::Slow, Speed::Large]);
}

programs! {
    true_and_false: quick("coreutils") {
        ["true"];
        ["false"];
        ["echo", "-e", "a\\tb", "c"];
        ["printf", "%05d %s %x\\n", "42", "text", "255"];
        ["test", "-d", "tree"];
        ["expr", "17", "*", "(", "3", "+", "4", ")"];
    }
    cat_and_friends: quick("coreutils") {
        ["cat", "-A", "poem.txt", "numbers.tsv"];
        ["tac", "poem.txt"];
        ["nl", "-ba", "poem.txt"];
        ["head", "-n", "3", "words.txt"];
        ["tail", "-c", "100", "words.txt"];
        ["wc", "words.txt", "poem.txt", "binary.bin"];
        ["fold", "-sw", "20", "poem.txt"];
        ["fmt", "-w", "60", "poem.txt"];
        ["tee", "copy.txt"], < "poem.txt";
        ["cat", "no-such-file"];
    }
    tr_cut_paste: quick("coreutils") {
        ["tr", "a-z", "A-Z"], < "poem.txt";
        ["tr", "-cs", "a-zA-Z", "\\n"], < "poem.txt";
        ["cut", "-f2", "numbers.tsv"];
        ["cut", "-c1-4,7", "words.txt"];
        ["paste", "-d:", "poem.txt", "poem2.txt"];
        ["expand", "numbers.tsv"];
        ["join", "-t", ",", "/dev/null", "words.txt"];
        ["comm", "poem.txt", "poem2.txt"];
    }
    sort_and_uniq: quick("coreutils") {
        ["sort", "--parallel=1", "words.txt"];
        ["sort", "--parallel=1", "-k2,2n", "-k1,1nr", "numbers.tsv"];
        ["sort", "--parallel=1", "-u", "-o", "sorted.txt", "words.txt"];
        ["uniq", "-c", "sorted.txt"];
        ["shuf", "--random-source=binary.bin", "-n", "5", "words.txt"];
        ["tsort"], < "words.txt";
    }
    checksums: quick("coreutils") {
        ["sha256sum", "words.txt", "binary.bin"];
        ["sha1sum", "binary.bin"];
        ["sha512sum", "words.txt"];
        ["md5sum", "poem.txt"];
        ["b2sum", "binary.bin"];
        ["cksum", "binary.bin"];
        ["base64", "binary.bin"];
        ["sum", "binary.bin"];
    }
    numbers: quick("coreutils") {
        ["seq", "-w", "1", "3", "100"];
        ["factor", "1234567890", "18446744073709551557", "97"];
        ["numfmt", "--to=iec", "123456789", "1024"];
        ["date", "-u", "-d", "@1700000000", "+%F %T %A %j %U"];
        ["date", "-u", "-d", "2024-02-28 + 2 days", "+%F"];
        ["od", "-A", "x", "-t", "x1z", "-N", "300", "binary.bin"];
        ["od", "-t", "f8", "-N", "64", "binary.bin"];
    }
    files: quick("coreutils") {
        ["mkdir", "-p", "new/deep/er"];
        ["cp", "-a", "tree", "copy"];
        ["mv", "copy/one.c", "new/moved.c"];
        ["ln", "-s", "../words.txt", "new/link"];
        ["chmod", "751", "new/moved.c"];
        ["rm", "-r", "copy/inner"];
        ["truncate", "-s", "1000", "new/deep/hole"];
        ["dd", "if=binary.bin", "of=new/part", "bs=100", "skip=3", "count=7", "status=none"];
        ["split", "-n", "3", "binary.bin", "new/piece-"];
        ["stat", "-c", "%n %s %a %F", "new/moved.c", "new/link", "tree"];
        ["ls", "-1F", "new", "tree"];
        ["ls", "-ld", "--time-style=+", "new/moved.c", "tree/two.txt"];
        ["realpath", "--relative-to=.", "new/link"];
        ["rmdir", "tree"];
    }
    environment: quick("coreutils") {
        ["env", "-i", "A=1", "B=two words", "env"];
        ["env", "-u", "HOME", "printenv", "HOME"];
        ["nice", "-n", "5", "nice"];
        ["timeout", "5", "sh", "-c", "echo in time; exit 9"];
        ["timeout", "0.05", "sleep", "10"];
        ["sleep", "0.01"];
        ["basename", "/a/b/c.txt", ".txt"];
        ["uname", "-s", "-m"];
        ["id", "-u"];
        ["pwd"];
    }
    xargs_and_find: quick("findutils coreutils") {
        ["xargs", "-n", "30", "echo"], < "words.txt";
        ["xargs", "-d", "\\n", "-I{}", "-n1", "printf", "<%s>"], < "poem.txt";
        ["find", "tree/inner/leaf", "-type", "f", "-printf", "%p %s %m\\n"];
        ["find", "tree", "-name", "three.c", "-exec", "cat", "{}", ";"];
        ["find", "tree", "-name", "*.txt", "-delete"];
        ["bash", "-c", "find . -type f | sort | xargs wc -c"];
    }
    bash_script: quick("bash") {
        ["bash", "script.sh"];
    }
    bash_pipes: quick("bash coreutils") {
        ["bash", "-c", "for i in 1 2 3; do echo $i | tr 1-3 a-c; done"];
        ["bash", "-c", "set -o pipefail; cat words.txt | grep a | sort | uniq -c | sort -rn | \
            head -3; echo ${PIPESTATUS[*]}"];
        ["bash", "-c", "a=(x y z); declare -A m=([k]=v [q]=w); echo ${a[@]^^} ${#a[*]} ${m[k]} \
            ${m[q]}; ((i=5*7)); echo $i ${i//3/x}"];
        ["bash", "-c", "diff <(sort words.txt | head -5) <(head -5 words.txt) > d; wc -l < d; \
            exec 3< poem.txt; read -r l <&3; echo \"$l\""];
        ["bash", "-c", "f() { if (($1 > 1)); then echo $(( $(f $(($1 - 1))) + $(f $(($1 - 2))) \
            )); else echo $1; fi; }; f 6"];
        ["bash", "-c", "kill -SEGV $$"];
        ["bash", "-c", "nosuchcommand; echo $?; ./Makefile; echo $?"];
        ["bash", "-c", "[[ abc123 =~ ([a-z]+)([0-9]+) ]] && echo ${BASH_REMATCH[2]}; printf -v x \
            '%08.3f' 3.14159; echo $x"];
    }
    bash_signals: quick("bash coreutils") {
        ["bash", "-c", "trap 'echo term; exit 3' TERM; kill -TERM $$; echo not here"];
        ["bash", "-c", "sleep 10 & p=$!; kill $p; wait $p; echo $?"];
        ["bash", "-c", "(trap 'echo child; exit 6' USR1; while :; do :; done) & p=$!; sleep 0.3; \
            kill -USR1 $p; wait $p; echo $?"];
        ["bash", "-c", "yes | head -2; echo ${PIPESTATUS[0]}"];
        ["bash", "-c", "read -t 0.05 x < <(sleep 0.3); echo $(($? > 128))"];
        ["bash", "-c", "all=; for i in 1 2 3 4; do (sleep 0.0$i; exit $i) & all=\"$all $!\"; \
            done; for p in $all; do wait $p; echo $?; done"];
    }
    dash: quick("dash") {
        ["dash", "script.sh"];
        ["dash", "-c", "i=0; while [ $i -lt 200 ]; do i=$((i+1)); done; echo $i"];
    }
    sed: quick("sed") {
        ["sed", "-n", "-e", "/a/s/\\([a-z]*\\) \\(.*\\)/\\2 \\1/p", "poem.txt"];
        ["sed", "-E", "s/[aeiou]+/<&>/g; 3d; $!N; P; D", "poem.txt"];
        ["sed", "-i", "s/river/RIVER/", "poem2.txt"];
        ["sed", "y/abc/xyz/;1!G;h;$!d", "words.txt"];
        ["sed", "s/\\(/x/", "words.txt"];
    }
    grep: quick("grep") {
        ["grep", "-n", "a[0-9]$", "words.txt"];
        ["grep", "-cvi", "BETA", "words.txt"];
        ["grep", "-Eo", "(gam|del)[a-z]+|[0-9]{2}$", "words.txt"];
        ["grep", "-P", "(?<=alpha)\\d(?!\\d)", "words.txt"];
        ["grep", "-q", "nothing like this", "words.txt"];
        ["grep", "-rc", "int", "tree/one.c", "tree/inner/three.c"];
        ["grep", "-E", "(.)(.).*\\2\\1", "poem.txt"];
    }
    awk: quick("mawk") {
        ["awk", "{ s += $1; m[$2]++ } END { print s, length(m); for (i = 0; i < 83; i++) if (i in \
            m) printf \"%d:%d \", i, m[i] }", "numbers.tsv"];
        ["awk", "-F,", "NR % 7 == 0 { gsub(/a/, \"A\"); print NR, toupper($1), substr($0, 2, 3) \
            }", "words.txt"];
        ["awk", "BEGIN { for (i = 1; i <= 300; i++) x = (x * 31 + i) % 65537; printf \"%d %.6f \
            %s\\n\", x, sin(1) + exp(2), x }"];
        ["awk", "BEGIN { while ((\"echo a b c\" | getline l) > 0) print l; print \"z\\na\" \
            | \"sort\"; close(\"sort\"); exit 7 }"];
    }
    bc: quick("bc") {
        ["bc", "-lq", "hello.bc"];
        ["bash", "-c", "echo 'scale=40; 4*a(1); sqrt(2); 2^200' | bc -l"];
    }
    perl: slow("perl-base") {
        ["perl", "-e", "my %h; while (<>) { chomp; $h{$1}++ if /^([a-z]+)/i } print map \
            { \"$_=$h{$_}\\n\" } sort keys %h", "words.txt"];
        ["perl", "-ne", "print scalar reverse if /(\\w)\\1/", "poem.txt"];
        ["perl", "-e", "my $s = 0; for my $i (1..3000) { $s = ($s * 31 + $i) % 1000003 } \
            printf \"%d %s\\n\", $s, join ',', map { $_ * 2 } grep { $_ % 2 } 1..9"];
        ["perl", "-e", "local $SIG{ALRM} = sub { die \"alarm\\n\" }; eval { alarm 1; select \
            undef, undef, undef, 5; }; print $@; print `echo child`; exit 4"];
        ["perl", "-e", "print pack('NnC', 1, 2, 3) eq \"\\0\\0\\0\\1\\0\\2\\3\" ? 'ok' : \
            'no', \"\\n\"; die 'at the end'"];
    }
    python_small: slow("python3-minimal") {
        ["python3", "-I", "-S", "-c", "import sys; print(sys.version_info[0], sum(i * i for i in \
            range(500)))"];
    }
    python_json: slow("python3") {
        ["python3", "-c", "import json; d = json.load(open('data.json')); \
            d['items'].sort(key=lambda i: i['v']); print(json.dumps(d, sort_keys=True, indent=1))"];
        ["python3", "-c", "import json; print(json.dumps(sorted(range(5))))"];
    }
    python_work: slow("python3") {
        ["python3", "-c", "import re, collections; t = open('poem.txt').read(); \
            print(collections.Counter(re.findall(r'\\b[a-z]{2,}\\b', t.lower())).most_common(6)); \
            print(re.sub(r'(\\w+) (\\w+)', r'\\2 \\1', t))"];
        ["python3", "-c", "import hashlib, zlib, struct, math; b = \
            open('binary.bin','rb').read(); print(hashlib.sha256(b).hexdigest(), zlib.crc32(b), \
            len(zlib.compress(b)), struct.unpack('<4d', b[:32]), math.lgamma(7.5), 2**521 % \
            1000007)"];
        ["python3", "-c", "import subprocess, sys; print(subprocess.run(['sh', '-c', 'echo out; \
            echo err >&2; exit 3'], capture_output=True)); raise SystemExit(9)"];
        ["python3", "-c", "1/0"];
    }
    tar: slow("tar") {
        ["tar", "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner",
            "-cf", "out.tar", "tree", "words.txt"];
        ["tar", "--utc", "-tvf", "out.tar"];
        ["mkdir", "extracted"];
        ["tar", "-xf", "out.tar", "-C", "extracted"];
        ["tar", "--sort=name", "--mtime=@0", "--owner=0", "--group=0",
            "-czf", "out.tar.gz", "tree"];
        ["tar", "-tf", "poem.txt"];
    }
    gzip: quick("gzip") {
        ["gzip", "-9nk", "words.txt"];
        ["gzip", "-nc", "binary.bin"];
        ["gzip", "-t", "words.txt.gz"];
        ["gzip", "-dc", "words.txt.gz"];
        ["gzip", "-dc", "poem.txt"];
    }
    bzip2: slow("bzip2") {
        ["bzip2", "-k1", "words.txt"];
        ["bzip2", "-dc", "words.txt.bz2"];
        ["bzip2", "-t", "poem.txt"];
    }
    xz: slow("xz-utils") {
        ["xz", "-T1", "-k0", "words.txt", "binary.bin"];
        ["xz", "-T1", "-dc", "words.txt.xz"];
        ["xz", "-T1", "-l", "binary.bin.xz"];
    }
    zstd: slow("zstd") {
        ["zstd", "--single-thread", "--no-asyncio", "-q", "-1", "words.txt"];
        ["zstd", "--single-thread", "--no-asyncio", "-q", "-dc", "words.txt.zst"];
    }
    xz_threads: slow("xz-utils") {
        ["xz", "-T2", "--block-size=4KiB", "-k0", "words.txt", "binary.bin"];
        ["xz", "-T2", "-dc", "words.txt.xz"];
    }
    zstd_threads: slow("zstd") {
        ["zstd", "-T2", "-q", "-1", "words.txt", "binary.bin"];
        ["zstd", "-T2", "-q", "-dc", "words.txt.zst"];
    }
    // sort uses one thread for fewer lines than these.
    sort_threads: slow("coreutils bash") {
        ["bash", "-c", "seq 131072 -1 1 | sort --parallel=2 -n | cksum"];
    }
    python_threads: slow("python3") {
        ["python3", "-I", "-S", "-c", "
import threading
lock, done, out = threading.Lock(), threading.Condition(), []
def work(n):
    for i in range(20):
        with lock: out.append(n * i)
    with done:
        left[0] -= 1
        done.notify()
left = [4]
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for t in threads: t.start()
with done: done.wait_for(lambda: left[0] == 0, 60)
for t in threads: t.join()
threading.Timer(0.001, lambda: out.append(1000)).start()
"];
        ["python3", "-c", "
import concurrent.futures, subprocess
with concurrent.futures.ThreadPoolExecutor(3) as pool:
    print(sum(pool.map(lambda x: x * x, range(100))))
    print(list(pool.map(lambda n: subprocess.run(['echo', str(n)], capture_output=True).stdout, \
    range(3))))
"];
    }
    pigz: slow("pigz") {
        ["pigz", "-p2", "-b128", "-kn", "binary.bin", "words.txt"];
        ["pigz", "-dc", "words.txt.gz"];
    }
    luajit: slow("luajit") {
        ["luajit", "jit.lua"];
        ["luajit", "-joff", "jit.lua"];
    }
    node: large("nodejs") {
        ["node", "jit.js"];
        ["node", "-e", "throw new RangeError('not caught')"];
    }
    java: large("openjdk-17-jdk-headless") [".hotspot"] {
        ["javac", "Jit.java"], prepares;
        ["java", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-cp", ".", "Jit"];
    }
    git: slow("git") [".git/index"] {
        ["git", "-c", "init.defaultBranch=main", "init", "-q"];
        ["git", "config", "user.email", "a@example.org"];
        ["git", "config", "user.name", "A"];
        ["git", "config", "gc.auto", "0"];
        ["git", "add", "words.txt", "tree"];
        ["git", "commit", "-qm", "first"];
        ["cp", "poem2.txt", "words.txt"];
        ["git", "diff", "--stat"];
        ["git", "commit", "-qam", "second"];
        ["git", "log", "--stat", "--format=%H %an %ad %s"];
        ["git", "show", "--format=fuller", "HEAD"];
        ["git", "status", "--short"];
        ["git", "grep", "--threads=2", "-c", "e"];
        ["git", "checkout", "-q", "nothing"];
    }
    gcc: slow("gcc libc6-dev binutils") {
        ["gcc", "-O2", "-o", "hello", "hello.c", "part.c"];
        ["./hello", "argument"];
    }
    gcc_parts: slow("gcc libc6-dev binutils") {
        ["cpp", "-P", "-DX=3", "hello.c", "hello.i"];
        ["gcc", "-O1", "-S", "part.c"];
        ["as", "-o", "part.o", "part.s"];
        ["nm", "part.o"];
        ["objdump", "-dr", "part.o"];
        ["readelf", "-hSs", "part.o"];
        ["ar", "rcD", "libpart.a", "part.o"];
        ["size", "part.o"];
        ["gcc", "-c", "words.txt.c"];
    }
    make: slow("make coreutils") {
        ["make"];
        ["make"];
        ["make", "-n", "-B"];
        ["make", "nothing"];
    }
    diff_and_patch: quick("diffutils patch") {
        ["diff", "-u", "--label", "a", "--label", "b", "poem.txt", "poem2.txt"];
        ["bash", "-c", "diff -u --label poem.txt --label poem.txt poem.txt poem2.txt > p; patch < \
            p; cmp poem.txt poem2.txt"];
        ["diff", "-rq", "tree", "tree/inner"];
        ["cmp", "-l", "poem.txt", "binary.bin"];
        ["cmp", "poem.txt", "poem.txt"];
        ["diff3", "poem.txt", "poem2.txt", "words.txt"];
    }
    openssl: slow("openssl") {
        ["openssl", "dgst", "-sha256", "words.txt", "binary.bin"];
        ["openssl", "enc", "-aes-128-cbc", "-nosalt",
            "-K", "000102030405060708090a0b0c0d0e0f",
            "-iv", "0f0e0d0c0b0a09080706050403020100", "-in", "poem.txt", "-out", "poem.enc"];
        ["openssl", "enc", "-d", "-aes-128-cbc", "-nosalt",
            "-K", "000102030405060708090a0b0c0d0e0f",
            "-iv", "0f0e0d0c0b0a09080706050403020100", "-in", "poem.enc"];
    }
    sqlite: slow("sqlite3") {
        ["sqlite3", "base.db", "create table t(a integer primary key, b text); insert into t(b) \
            values ('x'),('yy'),('zzz'); create index i on t(b);"];
        ["sqlite3", "base.db", "with recursive n(i) as (select 1 union all select i+1 from n \
            where i<50) insert into t(b) select hex(i*i) from n; select count(*), sum(length(b)), \
            max(b) from t; select * from t order by b limit 5;"];
        ["sqlite3", "base.db", "select * from nothing"];
    }
    jq: slow("jq") {
        ["jq", "-S", ".", "data.json"];
        ["jq", "-r", ".items | sort_by(.v) | map(\"\\(.k)=\\(.v)\") | join(\" \")", "data.json"];
    }
    ed_and_viewers: quick("ed xxd bsdextrautils") {
        ["ed", "-s", "poem.txt"], < "script.sh";
        ["xxd", "-l", "200", "binary.bin"];
        ["hexdump", "-C", "-n", "200", "binary.bin"];
        ["column", "-t", "numbers.tsv"];
        ["rev", "poem.txt"];
    }
    file_types: slow("file") {
        ["file", "words.txt", "hello.c", "binary.bin", "tree/link", "tree"];
    }
}

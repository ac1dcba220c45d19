//! Running one command with a limit, and comparing what two runs showed.

use crate::hangs;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Once, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// A command line with everything that determines its behaviour: directory, standard input and the
/// whole environment.
///
/// `Display` prints a line for a shell that replays it.
#[derive(Debug, Clone)]
pub struct Invocation {
    /// The file that is executed; also `argv[0]`.
    pub program: PathBuf,
    /// `argv[1..]`.
    pub args: Vec<OsString>,
    /// Working directory.
    pub directory: PathBuf,
    /// File that is standard input; `/dev/null` if none.
    pub stdin: Option<PathBuf>,
    /// The complete environment; nothing is inherited.
    pub environment: Vec<(OsString, OsString)>,
    /// The run, with all its descendants, is killed after this time.
    pub limit: Duration,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Exit with this status.
    Exited(i32),
    /// Killed by this signal.
    Killed(i32),
    /// Still running when the limit expired.
    TimedOut,
}

impl From<ExitStatus> for Status {
    fn from(status: ExitStatus) -> Status {
        match (status.code(), status.signal()) {
            (Some(code), _) => Status::Exited(code),
            (None, signal) => Status::Killed(signal.unwrap_or(0)),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Status::Exited(code) => write!(f, "exit status {code}"),
            Status::Killed(signal) => write!(f, "signal {signal}"),
            Status::TimedOut => write!(f, "a timeout"),
        }
    }
}

/// All that a run showed.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Bytes written to descriptor 1.
    pub stdout: Vec<u8>,
    /// Bytes written to descriptor 2.
    pub stderr: Vec<u8>,
    /// Wall-clock time; never compared.
    pub elapsed: Duration,
}

impl Invocation {
    /// A command in a directory, with the fixed environment of the tests and no input.
    pub fn new(program: impl Into<PathBuf>, directory: impl Into<PathBuf>) -> Invocation {
        let directory = directory.into();
        let environment = [
            ("PATH", OsStr::new("/usr/bin:/bin:/usr/sbin:/sbin")),
            ("HOME", directory.as_os_str()),
            ("LC_ALL", OsStr::new("C")),
            ("TZ", OsStr::new("UTC")),
            ("TMPDIR", OsStr::new("/tmp")),
        ];
        Invocation {
            program: program.into(),
            args: Vec::new(),
            environment: environment
                .iter()
                .map(|(key, value)| (OsString::from(key), value.into()))
                .collect(),
            directory,
            stdin: None,
            limit: limit(),
        }
    }

    /// The same with arguments appended.
    pub fn args<S: Into<OsString>>(mut self, args: impl IntoIterator<Item = S>) -> Invocation {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Runs it to its end or to the limit.
    ///
    /// A command that cannot be started counts as a run with status 127 and the system's message on
    /// stderr.
    pub fn run(&self) -> Outcome {
        self.run_observed(self.limit, |_| {})
    }

    /// The same, and calls `observe` with the process id once in each `period`.
    pub fn run_observed(&self, period: Duration, mut observe: impl FnMut(u32)) -> Outcome {
        let start = Instant::now();
        let mut child = match self.spawn() {
            Ok(child) => child,
            Err(error) => {
                return Outcome {
                    status: Status::Exited(127),
                    stdout: Vec::new(),
                    stderr: format!("test harness: {}: {error}\n", self.program.display())
                        .into_bytes(),
                    elapsed: start.elapsed(),
                };
            }
        };
        let deadline = start + self.limit;
        let (sender, finished) = mpsc::channel();
        let stdout = drain(child.stdout.take().expect("stdout is piped"), sender.clone());
        let stderr = drain(child.stderr.take().expect("stderr is piped"), sender);
        // The pipes close when the last descendant has ended; then only the child itself has to be
        // waited for.
        let mut open = 2;
        while open > 0 {
            match finished
                .recv_timeout(deadline.saturating_duration_since(Instant::now()).min(period))
            {
                Ok(()) => open -= 1,
                Err(_) if Instant::now() < deadline => observe(child.id()),
                Err(_) => break,
            }
        }
        let status = wait_until(&mut child, if open == 0 { deadline } else { Instant::now() });
        let status = match status {
            Some(status) if open == 0 => Status::from(status),
            _ => {
                let group = libc::pid_t::try_from(child.id()).expect("process ids fit in pid_t");
                eprintln!("{:?} does not end:\n{}", self.args, hangs::describe(group));
                kill_group(&child);
                child.wait().expect("wait for a killed child");
                Status::TimedOut
            }
        };
        Outcome {
            status,
            stdout: stdout.join().expect("stdout reader"),
            stderr: stderr.join().expect("stderr reader"),
            elapsed: start.elapsed(),
        }
    }

    fn spawn(&self) -> std::io::Result<Child> {
        let stdin = match &self.stdin {
            Some(path) => Stdio::from(File::open(path)?),
            None => Stdio::null(),
        };
        Command::new(&self.program)
            .args(&self.args)
            .current_dir(&self.directory)
            .env_clear()
            .envs(self.environment.iter().map(|(key, value)| (key, value)))
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
    }
}

/// Reads a pipe to its end in a thread of its own, and sends a message when it is done.
fn drain(
    mut pipe: impl Read + Send + 'static,
    done: mpsc::Sender<()>,
) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // Bytes that cannot be read show up as missing in the comparison.
        let _ = pipe.read_to_end(&mut bytes);
        // The receiver is gone only when the run has already timed out.
        let _ = done.send(());
        bytes
    })
}

fn wait_until(child: &mut Child, deadline: Instant) -> Option<ExitStatus> {
    let mut pause = Duration::from_micros(100);
    loop {
        if let Some(status) = child.try_wait().expect("wait for a child") {
            return Some(status);
        }
        if Instant::now() >= deadline {
            return None;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// Kills the child and all descendants that stayed in its process group.
fn kill_group(child: &Child) {
    let group = libc::pid_t::try_from(child.id()).expect("process ids fit in pid_t");
    // SAFETY: kill has no memory effects; the group's leader has not been waited for, so the id is
    // still its own, or the group is empty and the call fails harmlessly.
    unsafe { libc::kill(-group, libc::SIGKILL) };
}

fn limit() -> Duration {
    match std::env::var("DYNASOUR_TEST_TIMEOUT") {
        Ok(text) => Duration::from_secs(
            text.parse().expect("DYNASOUR_TEST_TIMEOUT must be a number of seconds"),
        ),
        Err(_) => Duration::from_secs(120),
    }
}

/// Turns core files off: guests crash on purpose.
pub fn disable_core_dumps() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the pointer is to a live structure that the call only reads.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) };
    });
}

/// What a run printed, for messages and comparisons.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Asserts that a dynasour command ended with a usage error whose message contains these words, and
/// printed nothing else.
#[track_caller]
pub fn refused(outcome: &Outcome, words: &[&str]) {
    let message = text(&outcome.stderr);
    assert_eq!(outcome.status, Status::Exited(2), "{message}");
    assert_eq!(text(&outcome.stdout), "");
    assert!(words.iter().all(|word| message.contains(word)), "{message}");
}

impl Outcome {
    /// What differs between this run (the reference) and another; `None` if nothing does.
    pub fn difference(&self, other: &Outcome) -> Option<String> {
        let mut parts = Vec::new();
        if other.status == Status::TimedOut {
            parts.push(format!(
                "it was killed after {:.0} s without an end",
                other.elapsed.as_secs_f64()
            ));
        } else if self.status != other.status {
            parts.push(format!("native ended with {}, this with {}", self.status, other.status));
        }
        parts.extend(stream_difference("stdout", &self.stdout, &other.stdout));
        parts.extend(stream_difference("stderr", &self.stderr, &other.stderr));
        if parts.is_empty() { None } else { Some(parts.join("\n  ")) }
    }

    /// The ends of both streams, for a failure message.
    pub fn excerpt(&self) -> String {
        format!("  stdout: {}\n  stderr: {}", tail(&self.stdout), tail(&self.stderr))
    }
}

fn tail(bytes: &[u8]) -> String {
    quote(&bytes[bytes.len().saturating_sub(300)..])
}

fn quote(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes.escape_ascii())
}

/// The first difference of two byte streams, with its line.
fn stream_difference(name: &str, native: &[u8], other: &[u8]) -> Option<String> {
    if native == other {
        return None;
    }
    let at =
        native.iter().zip(other).position(|(a, b)| a != b).unwrap_or(native.len().min(other.len()));
    let line = 1 + native[..at].iter().filter(|&&byte| byte == b'\n').count();
    let start =
        native[..at].iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
    Some(format!(
        "{name} differs at byte {at}, line {line} (native {} bytes, this {} bytes)\n    native: \
            {}\n    this:   {}",
        native.len(),
        other.len(),
        quote(line_from(native, start)),
        quote(line_from(other, start))
    ))
}

/// At most 400 bytes from the start of a line at `start`; they may hold several lines.
fn line_from(bytes: &[u8], start: usize) -> &[u8] {
    let rest = &bytes[start.min(bytes.len())..];
    &rest[..rest.len().min(400)]
}

impl fmt::Display for Invocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cd {} && env -i", shell_word(self.directory.as_os_str()))?;
        for (key, value) in &self.environment {
            write!(f, " {}={}", key.to_string_lossy(), shell_word(value))?;
        }
        write!(f, " {}", shell_word(self.program.as_os_str()))?;
        for argument in &self.args {
            write!(f, " {}", shell_word(argument))?;
        }
        match &self.stdin {
            Some(path) => write!(f, " < {}", shell_word(path.as_os_str())),
            None => write!(f, " < /dev/null"),
        }
    }
}

/// Quotes a word for a POSIX shell where it needs that.
fn shell_word(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=,:@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

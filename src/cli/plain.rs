//! Parses the command lines by which the programs that a guest executes are started.
//!
//! Building clap's parser takes longer than everything else that happens before such a program is
//! loaded. The lines are all of one form: a few options, and the program behind `--`. This parser
//! knows the options of `direct` and `full` runs without diagnostics. For anything else it returns
//! nothing, and clap parses the line.
//!
//! Data: none. Invariant: where it returns something, clap's parser returns the same.
//!
//! Example: `--tier direct --cache-size 67108864 --argv0=ls -- /bin/ls -l`.

use super::RunArgs;
use crate::machine::{MachineArgs, TraceArgs, parse_size};
use dynasour_runtime::config::placement;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::str::FromStr;

/// The options of `run` that stand in `line`; none if clap is to parse them.
pub fn parse(line: &[OsString]) -> Option<RunArgs> {
    let end = line.iter().position(|argument| argument == "--")?;
    let mut args = defaults(line.get(end + 1..).filter(|command| !command.is_empty())?);
    let mut given: Vec<&[u8]> = Vec::new();
    let mut options = line[..end].iter();
    while let Some(option) = options.next() {
        let option = option.as_bytes().strip_prefix(b"--")?;
        let (name, value) = match option.iter().position(|&byte| byte == b'=') {
            Some(at) => (&option[..at], Some(OsStr::from_bytes(&option[at + 1..]))),
            None => (option, None),
        };
        if given.contains(&name) {
            return None;
        }
        given.push(name);
        if (name, value) == (b"no-traces", None) {
            args.no_traces = true;
            continue;
        }
        let value = value.or_else(|| {
            options
                .next()
                .map(OsString::as_os_str)
                .filter(|next| !next.as_bytes().starts_with(b"-"))
        })?;
        match name {
            b"tier" => args.machine.tier = parsed(value)?,
            b"cache-size" => args.machine.cache_size = parse_size(value.to_str()?).ok()?,
            b"policy" => args.traces.policy = placement::placement(value.to_str()?).ok()?,
            b"sample" => args.machine.sample = parsed(value)?,
            b"race" => args.machine.race = parsed(value)?,
            b"argv0" => args.argv0 = Some(value.to_owned()),
            b"seccomp" => args.seccomp = Some(parsed(value)?),
            b"address-space" => args.address_space = Some(parsed(value)?),
            _ => return None,
        }
    }
    Some(args)
}

fn parsed<T: FromStr>(value: &OsStr) -> Option<T> {
    value.to_str()?.parse().ok()
}

/// What `run` does without options.
fn defaults(command: &[OsString]) -> RunArgs {
    RunArgs {
        machine: MachineArgs::new(),
        traces: TraceArgs::new(),
        chaos: None,
        no_traces: false,
        stats: false,
        stats_json: None,
        timeline: false,
        perf_map: false,
        log: Vec::new(),
        verify_traces: false,
        prove_traces: false,
        only_trace: None,
        count: None,
        count_detail: false,
        no_follow: false,
        argv0: None,
        seccomp: None,
        address_space: None,
        command: command.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Run;
    use super::*;
    use clap::Parser;
    use proptest::prelude::*;

    fn line(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    /// Where this parser returns something, clap returns the same.
    fn agrees_with_clap(line: &[OsString]) -> bool {
        let Some(own) = parse(line) else { return false };
        let whole = std::iter::once(OsString::from("run")).chain(line.iter().cloned());
        let theirs = Run::try_parse_from(whole).expect("clap takes it").args;
        assert_eq!(format!("{own:?}"), format!("{theirs:?}"));
        true
    }

    #[test]
    fn lines_of_children_are_plain() {
        for text in [
            "-- /bin/true",
            "--tier direct --cache-size 67108864 --policy default --argv0=-sh -- sh -c ls",
            "--tier full --no-traces --sample every=7 --seccomp=5 --argv0= -- /bin/ls -- --tier",
            "--address-space=1000000:18446744073709551615 --tier=copy --argv0=a=b -- x",
        ] {
            assert!(agrees_with_clap(&line(text)), "{text}");
        }
        // What every child gets that has no diagnostic options.
        let args = super::super::Cli::of(line("dynasour run --tier direct --no-traces -- x"));
        let Ok(super::super::Cli { command: super::super::Command::Run(args) }) = args else {
            panic!("run");
        };
        let mut child = args.into_config().child_options;
        child.extend(line("--argv0=x -- /bin/x"));
        assert!(agrees_with_clap(&child));
    }

    #[test]
    fn other_lines_are_left_to_clap() {
        for text in [
            "",
            "--",
            "/bin/true",
            "--tier direct /bin/true",
            "--tier direct --tier full -- x",
            "--tier nothing -- x",
            "--tier -- x",
            "--no-traces=1 -- x",
            "--cache-size 1 -- x",
            "--stats -- x",
            "-h -- x",
        ] {
            assert!(parse(&line(text)).is_none(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn whatever_it_takes_clap_takes_alike(words in proptest::collection::vec(prop_oneof![
            Just("--tier"), Just("--tier=direct"), Just("direct"), Just("--cache-size"), Just("1M"),
            Just("--policy=eager"), Just("--argv0="), Just("--argv0"), Just("--seccomp"), Just("3"),
            Just("-3"), Just("--no-traces"), Just("--"), Just("x"), Just("--sample"), Just("hz=5"),
            Just("--stats"), Just(""),
        ], 0..8)) {
            let words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
            agrees_with_clap(&words);
        }
    }
}

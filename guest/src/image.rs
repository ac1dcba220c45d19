//! Loading a guest program into this process, as execve(2) would load it into a fresh one.
//!
//! 1. [`resolve_command`] finds the file by execvp's rules.
//! 2. [`check`] reads and validates everything: permissions, `#!` lines, ELF headers, the dynamic
//!    linker. It maps nothing, so an execve that must fail can still return to the old program. The
//!    result is a [`Plan`].
//! 3. [`Plan::load`] maps the program and its dynamic linker, makes the stack, and returns the
//!    start address ([`Loaded`]). If a step fails, everything is unmapped again.
//!
//! *Invariant.* Guest and host share the address space, so unlike execve the loader never replaces
//! a mapping. Position-independent images go low (see [`crate::space`]). The others need the
//! addresses they were linked for, and loading fails if one of those is in use.
//!
//! *Access.* The functions take no lock, and change no mapping but those they make.
//!
//! ```no_run
//! use dynasour_guest::image::{LoadOptions, check};
//!
//! let plan = check("/bin/true".as_ref())?;
//! let loaded = plan.load(&[c"true".to_owned()], &[], &LoadOptions::default())?;
//! println!("starts at {:#x} with rsp = {:#x}", loaded.entry_pc, loaded.places.stack_pointer);
//! # Ok::<(), dynasour_guest::image::LoadError>(())
//! ```

mod auxv;
mod error;
mod executable;
mod header;
mod map;
mod script;
mod stack;

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

pub use error::{LoadError, Reason};
use executable::Ask;
pub use executable::resolve_command;
pub use stack::{StackLayout, StackPlace};

use crate::space::{self, Brk, MapEntry, page_up};
use header::Headers;
use map::Image;
use stack::{Contents, RANDOM_LEN, Stack};

/// Longest name of a process, NUL excluded (TASK_COMM_LEN).
const COMM_LEN: usize = 15;

/// Choices that the kernel makes by itself and this loader leaves to its caller.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Whether position-independent images go into [`space::LOW`]; otherwise the kernel places
    /// them.
    pub low: bool,
    /// The stack's size in bytes; `None` takes RLIMIT_STACK. Bounded to 256 KiB … 1 GiB either way.
    pub stack_size: Option<u64>,
    /// What AT_RANDOM points to; `None` asks the system for random bytes. (Stack protectors and
    /// malloc use it.)
    pub random: Option<[u8; RANDOM_LEN]>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions { low: true, stack_size: None, random: None }
    }
}

/// An ELF file, opened and checked.
#[derive(Debug)]
struct Program {
    path: PathBuf,
    file: File,
    headers: Headers,
}

/// A program that passed all checks that are possible without mapping it. Holds its files open.
#[derive(Debug)]
pub struct Plan {
    asked: PathBuf,
    file_name: CString,
    /// The words that replace the first argument if the program is a script: interpreter, its
    /// argument, script, …
    prefix: Vec<CString>,
    program: Program,
    linker: Option<Program>,
}

/// An image in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapped {
    /// From its first to its last page; unmapped holes inside are included.
    pub range: Range<u64>,
    /// The load bias: the number that was added to the file's addresses.
    pub load_bias: u64,
}

/// A program that is ready to run.
#[derive(Debug)]
pub struct Loaded {
    /// Start address: in the dynamic linker if there is one, else [`Loaded::program_entry`].
    pub entry_pc: u64,
    /// The program's own entry point (AT_ENTRY).
    pub program_entry: u64,
    /// Where the stack is.
    pub stack: StackPlace,
    /// Addresses of the stack's contents; all registers but rsp start as zero.
    pub places: StackLayout,
    /// The program break, still empty.
    pub brk: Brk,
    /// The program's file, as it was named.
    pub path: PathBuf,
    /// The process's name (/proc/self/comm): the file name's last component, cut to 15 bytes.
    pub comm: CString,
    /// The program, then its dynamic linker if it has one.
    pub images: Vec<Mapped>,
    /// From the first to the last byte of the program's executable segments, as the kernel counts
    /// them for /proc/self/stat.
    pub code: Range<u64>,
    /// Its initialised data, as the kernel counts it there and for RLIMIT_DATA.
    pub data: Range<u64>,
}

/// Reads and validates a program without mapping anything. It checks all that execve(2) checks
/// while the old program still runs. It also refuses programs that the kernel would accept and then
/// kill at once.
pub fn check(path: &Path) -> Result<Plan, LoadError> {
    find_program(path, Ask::Kernel).map_err(|reason| reason.about(path))
}

/// As [`check`], for a path that a process with the same rights has just checked: the kernel is not
/// asked again whether it would execute the files, which takes as long as all the rest.
pub fn check_again(path: &Path) -> Result<Plan, LoadError> {
    find_program(path, Ask::Nobody).map_err(|reason| reason.about(path))
}

/// Follows `#!` lines to an ELF file.
fn find_program(path: &Path, ask: Ask) -> Result<Plan, Reason> {
    let file_name = c_string(path.as_os_str().as_bytes())?;
    let mut prefix: Vec<CString> = Vec::new();
    let mut current = path.to_path_buf();
    let mut scripts = 0;
    loop {
        let step = open_step(&current, scripts, ask);
        let step = step.map_err(|reason| match scripts {
            0 => reason,
            _ if reason == Reason::ScriptDepth => reason,
            _ => {
                Reason::ScriptInterpreter { interpreter: current.clone(), reason: Box::new(reason) }
            }
        })?;
        match step {
            Opened::Script(line) => {
                // The interpreter's name replaces the script's argv[0]: interpreter, its argument,
                // the script's path.
                let mut arguments = vec![c_string(&line.interpreter)?];
                arguments.extend(line.argument.map(|argument| c_string(&argument)).transpose()?);
                arguments.push(c_string(current.as_os_str().as_bytes())?);
                prefix.splice(..prefix.len().min(1), arguments);
                current = PathBuf::from(OsStr::from_bytes(&line.interpreter));
                scripts += 1;
            }
            Opened::Program(program, linker) => {
                return Ok(Plan {
                    asked: path.to_path_buf(),
                    file_name,
                    prefix,
                    program: *program,
                    linker,
                });
            }
        }
    }
}

/// What a file turns out to be.
enum Opened {
    Script(script::ScriptLine),
    Program(Box<Program>, Option<Program>),
}

fn open_step(path: &Path, scripts: usize, ask: Ask) -> Result<Opened, Reason> {
    let file = if scripts == 0 {
        executable::open(path, ask)?
    } else {
        executable::open_interpreter(path, ask)?
    };
    if scripts > script::MAX_SCRIPTS {
        return Err(Reason::ScriptDepth);
    }
    let mut head = [0; script::HEAD];
    header::read_up_to(&file, 0, &mut head)?;
    if head.starts_with(b"#!") {
        return script::parse(&head).map(Opened::Script).ok_or(Reason::BadScriptLine);
    }
    let headers = Headers::read(&file)?;
    let linker = headers.interpreter.clone();
    let linker = linker.map(|name| open_linker(&file, &name, ask)).transpose()?;
    Ok(Opened::Program(Box::new(Program { path: path.to_path_buf(), file, headers }), linker))
}

/// Opens the dynamic linker whose name stands at `name` in `file`.
fn open_linker(file: &File, name: &Range<u64>, ask: Ask) -> Result<Program, Reason> {
    let mut bytes = vec![0; (name.end - name.start) as usize];
    let got = header::read_up_to(file, name.start, &mut bytes)?;
    let name = match bytes[..got].split_last() {
        Some((0, _)) => CStr::from_bytes_until_nul(&bytes),
        _ => return Err(Reason::Malformed("interpreter name without end".into())),
    };
    let name = name.map_err(|_| Reason::Malformed("interpreter name without end".into()))?;
    let path = PathBuf::from(OsStr::from_bytes(name.to_bytes()));
    let open = |path: &Path| {
        let file = executable::open_interpreter(path, ask)?;
        let headers = Headers::read(&file)?;
        Ok(Program { path: path.to_path_buf(), file, headers })
    };
    open(&path)
        .map_err(|reason| Reason::ElfInterpreter { interpreter: path, reason: Box::new(reason) })
}

fn c_string(bytes: &[u8]) -> Result<CString, Reason> {
    // A path with a NUL inside names no file; the lines of scripts end at one.
    CString::new(bytes).map_err(|_| Reason::NotFound)
}

impl Plan {
    /// The ELF file that will run: the program asked for, or the interpreter of its `#!` line.
    pub fn program_path(&self) -> &Path {
        &self.program.path
    }

    /// The dynamic linker that it asks for.
    pub fn linker_path(&self) -> Option<&Path> {
        self.linker.as_ref().map(|linker| linker.path.as_path())
    }

    /// The file name that the program is told (AT_EXECFN): the name that was asked for, even if
    /// that is a script.
    pub fn file_name(&self) -> &CStr {
        &self.file_name
    }

    /// The words that `#!` lines put in place of the first argument; empty if the program is not a
    /// script.
    pub fn script_prefix(&self) -> &[CString] {
        &self.prefix
    }

    /// The arguments that the program gets when it is given `arguments`.
    pub fn arguments(&self, arguments: &[CString]) -> Vec<CString> {
        match (self.prefix.is_empty(), arguments.is_empty()) {
            // Linux gives a program that is started without arguments an empty one.
            (true, true) => vec![CString::default()],
            (true, false) => arguments.to_vec(),
            (false, _) => self.prefix.iter().chain(arguments.iter().skip(1)).cloned().collect(),
        }
    }

    /// The process's name: the last component of the file name, cut to 15 bytes.
    pub fn comm(&self) -> CString {
        let name = self.file_name.to_bytes();
        let base = name.rsplit(|&byte| byte == b'/').next().unwrap_or(name);
        CString::new(&base[..base.len().min(COMM_LEN)]).unwrap_or_default()
    }

    /// Maps the program and its dynamic linker and prepares stack and break. On failure nothing
    /// stays mapped.
    pub fn load(
        self,
        arguments: &[CString],
        environment: &[CString],
        options: &LoadOptions,
    ) -> Result<Loaded, LoadError> {
        self.load_parts(arguments, environment, options).map_err(|reason| reason.about(&self.asked))
    }

    fn load_parts(
        &self,
        arguments: &[CString],
        environment: &[CString],
        options: &LoadOptions,
    ) -> Result<Loaded, Reason> {
        let arguments = self.arguments(arguments);
        let limit = options.stack_size.unwrap_or_else(stack::stack_limit);
        let mut contents = Contents {
            arguments: &arguments,
            environment,
            file_name: &self.file_name,
            random: [0; RANDOM_LEN],
            auxiliary: &[],
        };
        contents.check_size(limit)?;
        contents.random = options.random.map_or_else(random_bytes, Ok)?;

        let headers = &self.program.headers;
        let mut image = self.program.map(options)?;
        let map_linker = |linker: &'_ Program| {
            linker.map(options).map_err(|reason| Reason::ElfInterpreter {
                interpreter: linker.path.clone(),
                reason: Box::new(reason),
            })
        };
        let moved = |range: Range<u64>| {
            range.start.wrapping_add(image.bias)..range.end.wrapping_add(image.bias)
        };
        let (code, data) = (moved(headers.code()), moved(headers.data()));
        let data_len = data.end - data.start;
        // Before other images are placed.
        let brk_behind = page_up(headers.end())
            .filter(|_| !headers.relocatable && !space::is_randomised())
            .and_then(|end| Brk::behind(end, data_len));
        let mut linker = match &self.linker {
            Some(linker) => {
                executable::loaded_with(&linker.file);
                Some((linker, map_linker(linker)?))
            }
            None => None,
        };
        let program_entry = headers.entry.wrapping_add(image.bias);
        let auxiliary = auxv::build(&auxv::Program {
            program_headers: headers.program_headers.wrapping_add(image.bias),
            program_header_count: headers.program_header_count,
            interpreter_base: linker.as_ref().map_or(0, |(_, image)| image.bias),
            entry: program_entry,
        });
        contents.auxiliary = &auxiliary;
        let mut stack = Stack::map(limit, headers.executable_stack)?;
        let places = stack.fill(&contents)?;
        let brk = brk_behind.map_or_else(|| Brk::new(data_len), Ok);
        let brk =
            brk.map_err(|errno| Reason::CannotMap { what: "the program break".into(), errno })?;

        let entry_pc = linker
            .as_ref()
            .map_or(program_entry, |(linker, image)| linker.headers.entry.wrapping_add(image.bias));
        image.unmap_holes()?;
        if let Some((_, image)) = &mut linker {
            image.unmap_holes()?;
        }
        let stack_place = stack.place();
        stack.commit();
        let images = [Some(image), linker.map(|(_, image)| image)];
        let images = images.into_iter().flatten().map(Image::commit).collect();
        Ok(Loaded {
            entry_pc,
            program_entry,
            stack: stack_place,
            places,
            brk,
            path: self.program.path.clone(),
            comm: self.comm(),
            images,
            code,
            data,
        })
    }
}

impl Program {
    fn map(&self, options: &LoadOptions) -> Result<Image, Reason> {
        Image::map(&self.headers, &self.file, options.low)
    }
}

impl Loaded {
    /// The target of /proc/self/exe: the path of the program's file, as canonical as the kernel knows it. It stands in
    /// the list of mappings. (The link in `/proc/self/fd` says the same, but the kernel makes an inode for each name
    /// there, which takes 20 µs.)
    pub fn exe_path(&self, maps: &[MapEntry]) -> PathBuf {
        let program = self.images.first().map(|image| &image.range);
        let is_it = |map: &&MapEntry| program.is_some_and(|range| range.contains(&map.range.start));
        let mapped = maps.iter().filter(is_it).find_map(|map| map.path.clone());
        let canonical = mapped.map(PathBuf::from).or_else(|| self.path.canonicalize().ok());
        canonical.unwrap_or_else(|| self.path.clone())
    }
}

/// Random bytes for AT_RANDOM.
fn random_bytes() -> Result<[u8; RANDOM_LEN], Reason> {
    let mut bytes = [0; RANDOM_LEN];
    // SAFETY: the buffer is valid for its length. getrandom delivers up to 256 bytes whole.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    nix::errno::Errno::result(got).map_err(|errno| Reason::system("get random bytes", errno))?;
    Ok(bytes)
}

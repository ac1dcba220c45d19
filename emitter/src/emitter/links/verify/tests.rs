//! Each rule is broken on purpose, and the verifier says which one it was.

use super::Rule;
use crate::blocks::places::{self, FOREIGN, PLACE};
use crate::cache::writer;
use crate::codegen::mach::SiteKind;
use crate::emitter::{Config, Emitter, EntryState, StubTarget};
use crate::fragment::{ExitId, FragmentId, Link, set_target};
use crate::transfers::indirect::{Via, WAY_OUT};
use crate::transfers::stack_returns::Returns;
use dynasour_guest::decode::Bytes;
use dynasour_ir::text::version;

fn emitter(returns: Returns) -> Emitter {
    Emitter::new(Config { cache_size: 1 << 20, returns, ..Config::default() }).expect("memory")
}

/// A trace at `pc` that adds rdx to rax and ends at `target`. Its first guard leaves to its own pc,
/// without progress.
fn trace(emitter: &mut Emitter, pc: u64, target: u64) -> FragmentId {
    let text = format!(
        "region {pc:#x} {{ version t1 {{
    anchor a0 = base.{pc:#x} [rax = v0]
    anchor a1 = base.{target:#x} [rax = v2]
    b0(v0: i64 = rax, v1: i64 = rdx):
      v3 = eq.i64 v1, 5
      assume v3 else a0
      v2 = add.i64 v0, v1
      exit a1
  }} }}"
    );
    let version = version(&text).expect("a version");
    emitter.compile(&version, EntryState::Canonical).expect("room")
}

/// An exit of a fragment.
fn exit(emitter: &Emitter, fragment: FragmentId, kind: SiteKind) -> ExitId {
    let mut exits = emitter.fragments[fragment.0 as usize].exits.clone().map(ExitId);
    exits.find(|exit| emitter.exits[exit.0 as usize].kind == kind).expect("it has one")
}

/// Two linked traces, at 0x1000 and 0x2000, and the end of the first.
fn linked() -> (Emitter, [FragmentId; 2], ExitId) {
    let mut emitter = emitter(Returns::Table);
    let first = trace(&mut emitter, 0x1000, 0x2000);
    let second = trace(&mut emitter, 0x2000, 0x3000);
    let end = exit(&emitter, first, SiteKind::End);
    emitter.link(end, second).expect("both are there");
    assert_eq!(emitter.verify_links_and_tables(), Ok(()));
    (emitter, [first, second], end)
}

/// The link by which an end enters what it was linked to.
fn entering(emitter: &Emitter, end: ExitId) -> &Link {
    emitter.borrowed_link(end).or_else(|| emitter.link_of(end)).expect("it has one")
}

/// Where the code of [`copied`] begins, on two pages.
const CALLER: u64 = 0x10_0ff8;
const CALLED: u64 = 0x10_1000;

/// `je rel32`, and `call rel32` behind a prefix without effect.
const JE: &[u8; 2] = &[0x0f, 0x84];
const CALL: &[u8; 2] = &[0x3e, 0xe8];

/// A block that calls another on the next page, or leads there by a conditional branch.
fn copied(returns: Returns, first: &[u8; 2]) -> Emitter {
    let mut emitter = emitter(returns);
    let mut bytes = first.to_vec();
    bytes.extend([2, 0, 0, 0, 0x0f, 0x05]);
    bytes.extend([0x48, 0xff, 0xc0, 0xc3]);
    let code = Bytes { start: CALLER, bytes: &bytes };
    for pc in [CALLER, CALLED] {
        emitter.copy(pc, &code).expect("room");
    }
    assert_eq!(emitter.verify_links_and_tables(), Ok(()));
    emitter
}

/// The rule that does not hold.
fn broken(emitter: &Emitter) -> Rule {
    emitter.verify_links().expect_err("a rule was broken").rule
}

/// The index of the place at `pc`.
fn place(emitter: &Emitter, pc: u64) -> usize {
    emitter.blocks.by_pc[&pc] as usize
}

#[test]
fn a_jump_that_is_not_what_its_link_says() {
    let (emitter, _, end) = linked();
    let link = entering(&emitter, end);
    writer::lead(&emitter.cache, link.field, link.target() + 16);
    assert_eq!(broken(&emitter), Rule::Memory);
    writer::lead(&emitter.cache, link.field, link.target());
    assert_eq!(emitter.verify_links(), Ok(()));
    // An unlinked fragment's jumps lead out, whatever their targets.
    let (emitter, [first, _], end) = linked();
    emitter.unlink_for_signal(first);
    assert_eq!(emitter.verify_links(), Ok(()));
    let link = entering(&emitter, end);
    writer::lead(&emitter.cache, link.field, link.target());
    assert_eq!(broken(&emitter), Rule::Memory);
}

#[test]
fn a_blocks_jump_that_is_not_what_its_link_says() {
    let emitter = copied(Returns::Table, JE);
    let link = &emitter.blocks.links[0];
    writer::lead(
        &emitter.cache,
        emitter.blocks.base + u64::from(link.field),
        emitter.blocks.out(link),
    );
    assert_eq!(broken(&emitter), Rule::Memory);
}

#[test]
fn a_link_to_anywhere_but_an_entry() {
    let (mut emitter, [first, second], end) = linked();
    let entry = emitter.fragments[second.0 as usize].hot.end - 1;
    let link = emitter.link_of(end).expect("it has one");
    emitter.set_link(first, link, entry);
    assert_eq!(broken(&emitter), Rule::Destination);
    // An entry, of a fragment for another pc.
    let other = trace(&mut emitter, 0x4000, 0x5000);
    let entry = emitter.fragments[other.0 as usize].entry;
    let link = emitter.link_of(end).expect("it has one");
    emitter.set_link(first, link, entry);
    assert_eq!(broken(&emitter), Rule::Destination);
    // No code at all.
    let link = emitter.link_of(end).expect("it has one");
    emitter.set_link(first, link, emitter.stubs.leave_raw);
    assert_eq!(broken(&emitter), Rule::Destination);
}

#[test]
fn a_link_to_a_resting_fragment() {
    let (mut emitter, [_, second], end) = linked();
    emitter.put_to_rest(&[second]);
    assert_eq!(emitter.verify_links(), Ok(()));
    emitter.link(end, second).expect("both are there");
    assert_eq!(broken(&emitter), Rule::Resting);
    emitter.wake(second);
    assert_eq!(emitter.verify_links(), Ok(()));
}

#[test]
fn a_table_that_leads_to_a_resting_fragment() {
    let (mut emitter, [_, second], _) = linked();
    emitter.register_entry(0x2000, second).expect("it starts there");
    assert_eq!(emitter.verify_links(), Ok(()));
    emitter.put_to_rest(&[second]);
    assert_eq!(broken(&emitter), Rule::Resting);
    emitter.forget_entry(0x2000);
    assert_eq!(emitter.verify_links_and_tables(), Ok(()));
}

#[test]
fn a_place_that_leads_to_a_removed_block() {
    let mut emitter = copied(Returns::Table, JE);
    let place = place(&emitter, CALLED);
    let block = emitter.blocks.places[place].block;
    let doomed = emitter.remove_copied(&(CALLED..CALLED + 1));
    assert_eq!(emitter.verify_links(), Ok(()));
    emitter.blocks.places[place].block = block;
    let (cache, fragments) = (&emitter.cache, &emitter.fragments);
    emitter.blocks.lead(place as u32, block, cache, fragments);
    assert_eq!(broken(&emitter), Rule::Doomed);
    emitter.blocks.places[place].block = 0;
    emitter.blocks.lead(place as u32, 0, cache, fragments);
    emitter.reclaim(doomed);
    assert_eq!(emitter.verify_links_and_tables(), Ok(()));
}

#[test]
fn a_removed_block_that_is_still_returned_to() {
    let mut emitter = copied(Returns::Stack, CALL);
    let caller = emitter.blocks.places[place(&emitter, CALLER)].made[0];
    let branch = emitter.blocks.landing_branch(caller).expect("it calls");
    let doomed = emitter.remove_copied(&(CALLER..CALLER + 1));
    assert_eq!(emitter.verify_links(), Ok(()));
    emitter.cache.write(branch, &[0xe3]);
    assert_eq!(broken(&emitter), Rule::Doomed);
    writer::always_take(&emitter.cache, branch);
    emitter.reclaim(doomed);
    assert_eq!(emitter.verify_links(), Ok(()));
}

#[test]
fn a_list_that_lacks_a_link_or_has_one_twice() {
    let mut emitter = copied(Returns::Table, JE);
    emitter.blocks.part(0);
    assert_eq!(broken(&emitter), Rule::Lists);
    emitter.blocks.join(0);
    assert_eq!(emitter.verify_links(), Ok(()));
    // The end of a trace, which joins a list; and again.
    let first = trace(&mut emitter, 0x1000, CALLED);
    let end = exit(&emitter, first, SiteKind::End);
    emitter.link_end(end).expect("a direct end");
    assert_eq!(emitter.verify_links(), Ok(()));
    let number = emitter.blocks.links.len() as u32 - 1;
    assert_eq!(emitter.blocks.links[number as usize].place & FOREIGN, FOREIGN);
    emitter.blocks.part(number);
    assert_eq!(broken(&emitter), Rule::Lists);
    emitter.blocks.join(number);
    let places::Link { field, out, place, .. } = emitter.blocks.links[number as usize];
    emitter.blocks.links.push(places::Link::new(field, out, place));
    emitter.blocks.join(number + 1);
    assert_eq!(broken(&emitter), Rule::Lists);
    assert_eq!(place & PLACE, self::place(&emitter, CALLED) as u32);
}

#[test]
fn a_table_that_leads_to_code_for_another_pc() {
    let (mut emitter, [_, second], _) = linked();
    let checked = emitter.fragments[second.0 as usize].checked.expect("it is canonical");
    emitter.indirect.insert(Via::Memory, 0x7000, checked);
    assert_eq!(broken(&emitter), Rule::Tables);
    emitter.indirect.remove(0x7000);
    assert_eq!(emitter.verify_links_and_tables(), Ok(()));
    emitter.indirect.insert(Via::Memory, 0x2000, checked + WAY_OUT);
    assert_eq!(broken(&emitter), Rule::Tables);
}

#[test]
fn cycles_without_progress() {
    let mut emitter = emitter(Returns::Table);
    let versions = [0, 1].map(|_| trace(&mut emitter, 0x1000, 0x2000));
    let guards = versions.map(|version| exit(&emitter, version, SiteKind::Guard));
    emitter.resolve_exit(guards[0], StubTarget::Fragment(versions[1])).expect("room");
    assert_eq!(emitter.verify_links(), Ok(()), "a later version has no way back");
    emitter.resolve_exit(guards[1], StubTarget::Fragment(versions[0])).expect("room");
    assert_eq!(broken(&emitter), Rule::Progress);
    emitter.unlink(guards[1]).expect("it is there");
    assert_eq!(emitter.verify_links(), Ok(()));
    // Through the place that other links lead to: there the first version is entered again.
    emitter.lead_to(versions[0]);
    emitter.resolve_exit(guards[1], StubTarget::Place).expect("room");
    assert_eq!(broken(&emitter), Rule::Progress);
}

#[test]
fn a_cycle_of_one_trace_that_executes_instructions() {
    let mut emitter = emitter(Returns::Table);
    let only = trace(&mut emitter, 0x1000, 0x1000);
    let end = exit(&emitter, only, SiteKind::End);
    emitter.link(end, only).expect("it is there");
    assert_eq!(emitter.verify_links(), Ok(()));
    let guard = exit(&emitter, only, SiteKind::Guard);
    emitter.attach(guard, only).expect("it is there");
    assert_eq!(broken(&emitter), Rule::Progress);
}

#[test]
fn something_that_leads_on_after_everything_was_retired() {
    let (mut emitter, [first, second], _) = linked();
    emitter.retire_all();
    assert_eq!(emitter.verify_links_and_tables(), Ok(()));
    emitter.relink(first);
    assert_eq!(broken(&emitter), Rule::Retired);
    emitter.unlink_for_signal(first);
    assert_eq!(emitter.verify_links(), Ok(()));
    emitter.register_entry(0x2000, second).expect("it starts there");
    assert_eq!(broken(&emitter), Rule::Retired);
    emitter.flush_all();
    assert_eq!(emitter.verify_links_and_tables(), Ok(()));
}

/// Counts rcx down; the guard is the loop's back edge.
const COUNTDOWN: &str = "region 0x1000 { version t1 {
    anchor a0 = base.0x1000 [rcx = v2, rflags = v3]
    anchor a1 = base.0x2000 [rcx = v4, rflags = v5]
    b0(v0: i64 = rcx, v1: flags = rflags):
      jump b1(v0, v1)
    b1(v2: i64, v3: flags):
      poll else a0
      v4 = sub.i64 v2, 1
      v5 = flags.sub.i64 v2, 1
      v8 = cond.ne v5
      assume v8 else a1
      jump b1(v4, v5)
  } }";

#[test]
fn a_forced_guard_that_tests_again_after_its_fragment_was_unlinked() {
    let mut emitter = emitter(Returns::Table);
    let looping = version(COUNTDOWN).expect("a version");
    let looping = emitter.compile(&looping, EntryState::Canonical).expect("room");
    let guard = exit(&emitter, looping, SiteKind::Guard);
    let jump = emitter.exits[guard.0 as usize].jcc;
    assert!(matches!(jump, Some(crate::fragment::GuardJump::BackEdge(..))), "{jump:?}");
    emitter.force_guard(guard, true).expect("a guard");
    assert_eq!(emitter.verify_links(), Ok(()));
    emitter.put_to_rest(&[looping]);
    // The back edge goes on leading out: a thread inside is to come out.
    emitter.force_guard(guard, false).expect("a guard");
    assert_eq!(emitter.verify_links(), Ok(()));
    emitter.wake(looping);
    assert_eq!(emitter.verify_links(), Ok(()));
}

#[test]
fn links_lead_to_a_fragment_even_without_room_for_passages() {
    let mut emitter = emitter(Returns::Table);
    let first = trace(&mut emitter, 0x1000, 0x2000);
    let text = "region 0x2000 { version t1 {
    anchor a0 = base.0x3000 [rax = 7]
    b0(v0: i64 = rax):
      exit a0
  } }";
    let second = version(text).expect("a version");
    let second = emitter.compile(&second, EntryState::Canonical).expect("room");
    let third =
        emitter.compile(&version(text).expect("a version"), EntryState::Canonical).expect("room");
    let end = exit(&emitter, first, SiteKind::End);
    emitter.lead_to(second);
    emitter.link_end(end).expect("a direct end");
    assert_eq!(emitter.verify_links(), Ok(()));
    while emitter.cache.alloc_hot(16, 1).is_ok() {}
    emitter.lead_to(third);
    assert_eq!(emitter.verify_links(), Ok(()));
    let link = emitter.link_of(end).expect("it has one");
    assert_eq!(writer::led(&emitter.cache, link.field), emitter.fragments[third.0 as usize].entry);
}

/// A thread that a signal called out leaves by an end although that is linked to a fragment. When
/// it comes to the runtime, the end joins the list of its place, so that it leads elsewhere when
/// the block goes.
#[test]
fn an_end_that_was_linked_to_a_fragment_joins_its_place() {
    let (mut emitter, _, end) = linked();
    let code = Bytes { start: 0x2000, bytes: &[0x48, 0xff, 0xc0, 0xc3] };
    emitter.copy(0x2000, &code).expect("room");
    let link = emitter.link_of(end).expect("it has one").field;
    let second = emitter.canonical_way(FragmentId(0), &emitter.fragments[1]);
    set_target(&emitter.fragments, link, second, &emitter.cache);
    emitter.link_end(end).expect("the block is there");
    emitter.link_end(end).expect("once more changes nothing");
    assert_eq!(emitter.verify_links_and_tables(), Ok(()));
    let doomed = emitter.remove_copied(&(0x2000..0x2001));
    assert_eq!(doomed.len(), 1);
    assert_eq!(emitter.verify_links_and_tables(), Ok(()));
}

//! The rewrite rules of the passes, stated in `tests/rules/*.rules` and proven for all values and constants.
//!
//! A line is `NAME: LEFT = RIGHT when CONDITION for TYPES`. Both sides become terms in no normal form, and the
//! solver shows that they are equal wherever the condition holds. A rule that it does not decide is tested
//! for all values of eight bits, and the test says so. Further, for some constants that fulfil the
//! condition, pass `simplify` must make of LEFT what it makes of RIGHT: the line says what the code does.

use super::solver::{Answer, Depth, Solver};
use super::term::{Symbol, Term, Terms};
use super::z3::Z3;
use crate::builder::Builder;
use crate::defs::{Defs, Expr};
use crate::op::{ArgTy, Cond, FlagOp, Op, ResultTy};
use crate::opt::{OptOptions, optimise_with};
use crate::random::Rng;
use crate::semantics;
use crate::types::{BlockId, Gpr, Loc, Operand, Ty};
use crate::version::{Anchor, Block, Term as End, Version};
use std::collections::BTreeMap;
use std::path::Path;

/// An expression of a rule.
#[derive(Clone, PartialEq, Debug)]
enum Tree {
    Number(u64, Ty),
    /// A value (x, y, z), a constant (c, d) or flags (f).
    Name(char, Ty),
    Apply(Op, Ty, Vec<Tree>),
}

/// One line, for one type.
struct Rule {
    name: String,
    ty: Ty,
    left: Tree,
    right: Tree,
    condition: Tree,
}

fn types(text: &str) -> Vec<Ty> {
    let ty = |name: &str| *Ty::ALL.iter().find(|t| t.name() == name).expect("a type");
    text.split_whitespace().map(ty).collect()
}

fn operation(name: &str) -> Option<Op> {
    let plain = Op::PLAIN.iter().copied().filter(|op| !matches!(op, Op::Zext(_)));
    let from = [Ty::I1, Ty::I8, Ty::I16, Ty::I32];
    plain
        .chain(from.into_iter().flat_map(|ty| [Op::Zext(ty), Op::Sext(ty)]))
        .chain(Cond::ALL.map(Op::Cond))
        .chain(FlagOp::TABLE.iter().map(|(op, ..)| Op::Flags(*op)))
        .find(|op| op.to_string() == name)
}

/// A parser of one line.
struct Parser<'a> {
    words: Vec<&'a str>,
    at: usize,
    /// W.
    ty: Ty,
    /// The types of the names so far.
    known: &'a mut BTreeMap<char, Ty>,
}

impl<'a> Parser<'a> {
    /// The tree of a text, whose type is `expected` if nothing else says which.
    fn parse(text: &'a str, ty: Ty, expected: Ty, known: &'a mut BTreeMap<char, Ty>) -> Tree {
        let mut words = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let end = match rest.starts_with(['(', ')']) {
                true => 1,
                false => rest.find(['(', ')', ' ']).unwrap_or(rest.len()),
            };
            words.push(&rest[..end]);
            rest = rest[end..].trim_start();
        }
        Parser { words, at: 0, ty, known }.tree(expected)
    }

    fn next(&mut self) -> &'a str {
        self.at += 1;
        self.words[self.at - 1]
    }

    /// The name and its suffix.
    fn suffixed(&self, word: &'a str) -> (&'a str, Option<Ty>) {
        match word.rsplit_once('.') {
            Some((name, ty)) if Ty::ALL.iter().any(|t| t.name() == ty) => {
                (name, types(ty).first().copied())
            }
            _ => (word, None),
        }
    }

    /// An expression of which `expected` is wanted.
    fn tree(&mut self, expected: Ty) -> Tree {
        let word = self.next();
        if word != "(" {
            let (name, suffix) = self.suffixed(word);
            let letter = name.chars().next().expect("a word");
            let known = self.known.get(&letter).copied();
            let ty = suffix.or(known).unwrap_or(expected);
            return match letter {
                'c' | 'd' | 'f' | 'x' | 'y' | 'z' => {
                    self.known.insert(letter, ty);
                    Tree::Name(letter, ty)
                }
                _ => {
                    let value = match name.strip_prefix("0x") {
                        Some(hex) => u64::from_str_radix(hex, 16).expect("a number"),
                        None => name.parse::<i64>().expect("a number") as u64,
                    };
                    Tree::Number(value & ty.mask(), ty)
                }
            };
        }
        let word = self.next();
        let (name, suffix) = self.suffixed(word);
        let op = operation(name).unwrap_or_else(|| panic!("no operation {name}"));
        let (args, result) = op.signature();
        let ty = suffix.unwrap_or(match result {
            ResultTy::Same => expected,
            _ if args.contains(&ArgTy::Same) => self.ty,
            _ => Ty::I64,
        });
        let trees = args
            .iter()
            .map(|arg| match arg {
                ArgTy::Same => self.tree(ty),
                ArgTy::Is(ty) => self.tree(*ty),
            })
            .collect();
        assert_eq!(self.next(), ")", "{name}");
        Tree::Apply(op, ty, trees)
    }
}

impl Tree {
    fn ty(&self) -> Ty {
        match self {
            Tree::Number(_, ty) | Tree::Name(_, ty) => *ty,
            Tree::Apply(op, ty, _) => match op.signature().1 {
                ResultTy::Is(ty) => ty,
                _ => *ty,
            },
        }
    }

    fn names(&self, found: &mut BTreeMap<char, Ty>) {
        match self {
            Tree::Number(..) => {}
            Tree::Name(name, ty) => {
                let before = *found.entry(*name).or_insert(*ty);
                assert_eq!(before, *ty, "{name} has two types");
            }
            Tree::Apply(_, _, args) => args.iter().for_each(|arg| arg.names(found)),
        }
    }

    fn value(&self, values: &BTreeMap<char, u64>) -> u64 {
        match self {
            Tree::Number(value, _) => *value,
            Tree::Name(name, ty) => values[name] & ty.mask(),
            Tree::Apply(op, ty, args) => {
                let args: Vec<u64> = args.iter().map(|arg| arg.value(values)).collect();
                semantics::eval(*op, *ty, &args)
            }
        }
    }

    /// As a term in no normal form.
    fn term(&self, terms: &mut Terms, names: &BTreeMap<char, Term>) -> Term {
        match self {
            Tree::Number(value, ty) => terms.number(*value, ty.bits()),
            Tree::Name(name, _) => names[name],
            Tree::Apply(op, ty, args) => {
                let args: Vec<Term> = args.iter().map(|arg| arg.term(terms, names)).collect();
                terms.raw(*op, *ty, &args)
            }
        }
    }

    /// As instructions; what is made of constants only is a number.
    fn instructions(
        &self,
        b: &mut Builder<'_>,
        names: &BTreeMap<char, Operand>,
        constants: &BTreeMap<char, u64>,
    ) -> Operand {
        let mut free = BTreeMap::new();
        self.names(&mut free);
        match self {
            _ if free.keys().all(|name| matches!(name, 'c' | 'd')) => {
                Operand::Const(self.value(constants))
            }
            Tree::Number(value, _) => Operand::Const(*value),
            Tree::Name(name, _) => names[name],
            Tree::Apply(op, ty, args) => {
                let args: Vec<Operand> =
                    args.iter().map(|arg| arg.instructions(b, names, constants)).collect();
                let def = b.version.value(self.ty());
                b.insts.push(crate::Inst::new(*op, *ty, Some(def), &args));
                def.into()
            }
        }
    }
}

/// The rules of the files.
fn rules() -> Vec<Rule> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rules");
    let mut rules = Vec::new();
    for file in ["simplify.rules", "conditions.rules"] {
        let text = std::fs::read_to_string(directory.join(file)).expect("the rules");
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with(';')) {
            let (name, rest) = line.split_once(':').expect("a name");
            let (rest, of) = rest.split_once(" for ").unwrap_or((rest, "i8 i16 i32 i64"));
            let (equation, condition) = rest.split_once(" when ").unwrap_or((rest, "1"));
            let (left, right) = equation.split_once(" = ").expect("an equation");
            for ty in types(of) {
                let mut known = BTreeMap::new();
                let left = Parser::parse(left, ty, ty, &mut known);
                let right = Parser::parse(right, ty, left.ty(), &mut known);
                let condition = Parser::parse(condition, ty, Ty::I1, &mut known);
                assert_eq!(left.ty(), right.ty(), "{name}");
                rules.push(Rule { name: name.to_string(), ty, left, right, condition });
            }
        }
    }
    rules
}

impl Rule {
    fn names(&self) -> BTreeMap<char, Ty> {
        let mut names = BTreeMap::new();
        [&self.left, &self.right, &self.condition].iter().for_each(|t| t.names(&mut names));
        names
    }

    /// Does the solver show that both sides are equal, for these values of some constants?
    fn is_proven(&self, constants: &BTreeMap<char, u64>) -> bool {
        let mut terms = Terms::default();
        let mut names = BTreeMap::new();
        for (i, (name, ty)) in self.names().into_iter().enumerate() {
            let term = match ty {
                _ if constants.contains_key(&name) => terms.number(constants[&name], ty.bits()),
                Ty::Flags => terms.symbol(Symbol::Entry(Loc::Flags), 64),
                ty => terms.symbol(Symbol::Entry(Loc::from_ssa_index(i)), ty.bits()),
            };
            names.insert(name, term);
        }
        let left = self.left.term(&mut terms, &names);
        let right = self.right.term(&mut terms, &names);
        let condition = self.condition.term(&mut terms, &names);
        let goal = match self.left.ty() {
            Ty::Flags => terms.equal_flags(left, right),
            ty => terms.raw(Op::Eq, ty, &[left, right]),
        };
        let holds = terms.constant(condition) == Some(1);
        let hold: Vec<Term> = if holds { Vec::new() } else { vec![condition] };
        left == right
            || Z3 { work: 10_000_000 }.follows(&terms, &hold, goal, Depth::Terms) == Answer::Follows
    }

    /// The same for each value of the constants, if they are counts.
    fn is_proven_for_each_count(&self) -> bool {
        let names: Vec<char> = self
            .names()
            .into_iter()
            .filter(|(name, ty)| matches!(name, 'c' | 'd') && *ty == Ty::I8)
            .map(|(name, _)| name)
            .collect();
        let counts = (0..256u64.pow(names.len() as u32)).map(|n| -> BTreeMap<char, u64> {
            names.iter().enumerate().map(|(i, c)| (*c, n >> (8 * i) & 0xff)).collect()
        });
        !names.is_empty()
            && counts
                .filter(|counts| self.condition.value(counts) != 0)
                .all(|counts| self.is_proven(&counts))
    }

    /// Are both sides equal for all values of eight bits?
    fn holds_for_all_bytes(&self) -> bool {
        let names: Vec<char> = self.names().into_keys().collect();
        let all = self.names().values().all(|ty| ty.bits() <= 8);
        assert!(all && names.len() <= 3, "{}: too many values to try all", self.name);
        let count = 256u64.pow(names.len() as u32);
        (0..count).all(|n| {
            let values = names.iter().enumerate().map(|(i, c)| (*c, n >> (8 * i) & 0xff)).collect();
            self.condition.value(&values) == 0
                || self.left.value(&values) == self.right.value(&values)
        })
    }

    /// What `simplify` makes of one side with these constants.
    fn simplified(&self, side: &Tree, constants: &BTreeMap<char, u64>) -> String {
        let mut version = Version::new("t1", 0x1000);
        let mut params = Vec::new();
        for index in 0..Loc::SSA_COUNT {
            let loc = Loc::from_ssa_index(index);
            params.push(version.value(loc.ty()));
            version.entry_locs.push(loc);
        }
        let mut b = Builder::new(&mut version);
        let mut names = BTreeMap::new();
        for (i, (name, ty)) in self.names().into_iter().enumerate() {
            let value = match ty {
                Ty::Flags => params[16].into(),
                // Something of which the rules know nothing.
                Ty::I1 => {
                    let one = b.binary(Op::LtU, Ty::I64, params[i].into(), params[15].into());
                    let two = b.binary(Op::LtU, Ty::I64, params[i].into(), params[14].into());
                    b.binary(Op::And, Ty::I1, one, two)
                }
                ty => b.trunc(ty, Ty::I64, params[i].into()),
            };
            names.insert(name, value);
        }
        let result = side.instructions(&mut b, &names, constants);
        let (loc, value) = match self.left.ty() {
            Ty::Flags => (Loc::Flags, result),
            ty => (Loc::Gpr(Gpr::RAX), b.zext(Ty::I64, ty, result)),
        };
        let insts = b.insts;
        let anchor = version.anchor(Anchor::new(Operand::Const(0x2000), vec![(loc, value)]));
        version.blocks.push(Block { params, insts, term: End::Exit(anchor) });
        crate::verify::assert_valid(&version);
        optimise_with(
            &mut version,
            &["simplify", "dce", "simplify", "dce"],
            &OptOptions::default(),
        );
        assert_eq!(version.blocks.len(), 1, "{}", BlockId(0));
        let defs = Defs::of(&version);
        words(&defs, version.anchors[0].varmap[0].1)
    }

    /// Constants that fulfil the condition.
    fn constants(&self, rng: &mut Rng) -> BTreeMap<char, u64> {
        for _ in 0..20_000 {
            let names = self.names().into_iter();
            let constants: BTreeMap<char, u64> = names
                .map(|(name, ty)| {
                    let number = match rng.below(3) {
                        0 => rng.interesting(),
                        1 => rng.below(70) as u64,
                        _ => rng.bits() >> (8 * rng.below(8)),
                    };
                    (name, number & ty.mask())
                })
                .collect();
            if self.condition.value(&constants) != 0 {
                return constants;
            }
        }
        panic!("{} for {}: no constants fulfil the condition", self.name, self.ty)
    }
}

/// An operand as what defines it.
fn words(defs: &Defs, operand: Operand) -> String {
    let Some(Expr { op, ty, args }) = defs.get(operand) else { return operand.to_string() };
    let count = op.signature().0.len();
    let args: Vec<String> = args[..count].iter().map(|arg| words(defs, *arg)).collect();
    format!("({op}.{ty} {})", args.join(" "))
}

#[test]
fn every_rule_is_proven_or_tested_for_all_bytes() {
    let rules = rules();
    let (mut proven, mut tried) = (0, Vec::new());
    for rule in &rules {
        if rule.is_proven(&BTreeMap::new()) || rule.is_proven_for_each_count() {
            proven += 1;
        } else {
            tried.push((rule.name.clone(), rule.ty));
        }
    }
    // A rule that is not decided for a wider type is tested for i8.
    for (name, ty) in &tried {
        let narrow = rules.iter().find(|r| r.name == *name && r.ty == Ty::I8);
        let narrow = narrow.unwrap_or_else(|| panic!("{name} for {ty} is not proven"));
        assert!(narrow.holds_for_all_bytes(), "{name} is wrong");
        println!("{name} for {ty}: not decided, tested for all values of i8");
    }
    println!("{proven} of {} rules proven", rules.len());
    assert!(20 * proven > 19 * rules.len(), "{proven} of {}: {tried:?}", rules.len());
}

#[test]
fn every_rule_is_what_the_pass_does() {
    let mut rng = Rng::new(5);
    let mut wrong = Vec::new();
    for rule in rules() {
        for _ in 0..6 {
            let constants = rule.constants(&mut rng);
            let left = rule.simplified(&rule.left, &constants);
            let right = rule.simplified(&rule.right, &constants);
            if left != right {
                wrong.push(format!(
                    "{} for {}, {constants:x?}: {left}, not {right}",
                    rule.name, rule.ty
                ));
                break;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_wrong_rule_is_not_proven() {
    for (left, right) in [
        ("(add x 0)", "(sub x 1)"),
        ("(cond.l (flags.add x y))", "(lt.s (add x y) 0)"),
        ("(cond.e (flags.shl x c.i8 f))", "(eq (shl x c.i8) 0)"),
        ("(lt.s (zext1.i64 x.i1) 1)", "(eq.i1 x.i1 1)"),
    ] {
        let mut known = BTreeMap::new();
        let left = Parser::parse(left, Ty::I64, Ty::I64, &mut known);
        let right = Parser::parse(right, Ty::I64, left.ty(), &mut known);
        let condition = Tree::Number(1, Ty::I1);
        let rule = Rule { name: "wrong".to_string(), ty: Ty::I64, left, right, condition };
        assert!(!rule.is_proven(&BTreeMap::new()), "{:?}", rule.left);
    }
}

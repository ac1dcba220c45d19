//! An ELF file in memory that gives native code names, for GDB.
//!
//! It is relocatable and has one section without contents for each piece of code, at the code's address,
//! with one symbol in it. GDB reads the code itself from the process. There is no information for unwinding:
//! a trace has no frame of its own, and the frame of the guest's function is not described.
//!
//! No data, no lock. Example: the trace `t12` gives the section `.text0` at 0x2000_0470 and the
//! function `dynasour:t12:work+0x28` at its beginning.

use object::Endianness;
use object::elf::{
    ELFOSABI_NONE, EM_X86_64, ET_REL, FileFlags, SHF_ALLOC, SHF_EXECINSTR, SHN_UNDEF, SHT_NOBITS,
    STB_GLOBAL, STT_FUNC, SymbolInfo, SymbolOther,
};
use object::write::elf::{FileHeader, SectionHeader, Sym, Writer};
use std::ops::Range;

/// The file that names each piece of code.
///
/// # Errors
/// Names or sections are too large for the format.
pub fn file(pieces: &[(String, Range<u64>)]) -> Result<Vec<u8>, object::write::Error> {
    let section_names: Vec<String> = (0..pieces.len()).map(|n| format!(".text{n}")).collect();
    let mut bytes = Vec::new();
    let mut writer = Writer::new(Endianness::Little, true, &mut bytes);
    writer.reserve_file_header();
    writer.reserve_null_section_index();
    writer.reserve_null_symbol_index();
    let mut parts = Vec::new();
    for ((name, code), section_name) in pieces.iter().zip(&section_names) {
        let section = writer.reserve_section_index();
        let names =
            (writer.add_section_name(section_name.as_bytes()), writer.add_string(name.as_bytes()));
        parts.push((names, section, code));
    }
    for (_, section, _) in &parts {
        writer.reserve_symbol_index(Some(*section));
    }
    writer.reserve_symtab_section_index();
    writer.reserve_strtab_section_index();
    writer.reserve_shstrtab_section_index();
    writer.reserve_symtab();
    writer.reserve_strtab()?;
    writer.reserve_shstrtab()?;
    writer.reserve_section_headers();

    writer.write_file_header(&FileHeader {
        os_abi: ELFOSABI_NONE,
        abi_version: 0,
        e_type: ET_REL,
        e_machine: EM_X86_64,
        e_entry: 0,
        e_flags: FileFlags(0),
    })?;
    writer.write_null_symbol();
    for ((_, name), section, code) in &parts {
        writer.write_symbol(&Sym {
            st_name: writer.string_offset(Some(*name)),
            section: Some(section.0),
            st_info: SymbolInfo::new(STB_GLOBAL, STT_FUNC),
            st_other: SymbolOther(0),
            st_shndx: SHN_UNDEF,
            st_value: 0,
            st_size: code.end - code.start,
        });
    }
    writer.write_strtab();
    writer.write_shstrtab();
    writer.write_null_section_header();
    for ((name, _), _, code) in &parts {
        writer.write_section_header(&SectionHeader {
            sh_name: writer.section_name_offset(Some(*name)),
            sh_type: SHT_NOBITS,
            sh_flags: SHF_ALLOC | SHF_EXECINSTR,
            sh_addr: code.start,
            sh_offset: 0,
            sh_size: code.end - code.start,
            sh_link: 0,
            sh_info: 0,
            sh_addralign: 1,
            sh_entsize: 0,
        });
    }
    writer.write_symtab_section_header(1);
    writer.write_strtab_section_header();
    writer.write_shstrtab_section_header();
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use goblin::elf::Elf;

    #[test]
    fn each_piece_has_a_section_and_a_symbol() {
        let pieces =
            [("dynasour:t1:work".to_string(), 0x2000_0000..0x2000_0040), ("cold".into(), 5..9)];
        let bytes = file(&pieces).expect("a file");
        let elf = Elf::parse(&bytes).expect("an ELF file");
        let symbols: Vec<_> = elf.syms.iter().skip(1).collect();
        assert_eq!(symbols.len(), pieces.len());
        for (symbol, (name, code)) in symbols.iter().zip(&pieces) {
            assert_eq!(elf.strtab.get_at(symbol.st_name), Some(name.as_str()));
            assert!(symbol.is_function() && symbol.st_size == code.end - code.start);
            let section = &elf.section_headers[symbol.st_shndx];
            assert_eq!(section.vm_range(), code.start as usize..code.end as usize);
        }
    }
}

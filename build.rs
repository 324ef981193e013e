//! The build script: compiles `proto/` with protox, a compiler in Rust, so no `protoc` is needed.

use std::fs;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut files: Vec<PathBuf> = fs::read_dir("proto")?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    files.sort();
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        // Maps as BTreeMap: the response for a container is the same bytes every time (I6).
        .btree_map(".")
        .codec_path("crate::kubelet::codec::Exact")
        .compile_fds(descriptors)?;
    Ok(())
}

//! Compiles `proto/` with protox, a compiler written in Rust: no `protoc` is needed on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "proto/deviceplugin_v1beta1.proto",
        "proto/deviceplugin_v1alpha.proto",
        "proto/podresources_v1.proto",
        "proto/podresources_v1alpha1.proto",
    ];
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        // Maps as BTreeMap: what a container gets is the same bytes every time (I6).
        .btree_map(".")
        .compile_fds(descriptors)?;
    Ok(())
}

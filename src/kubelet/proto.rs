//! The kubelet's APIs, generated from `proto/`. Only `kubelet/` and the simulated kubelets use
//! these types.

#![allow(
    missing_docs,
    unreachable_pub,
    missing_debug_implementations,
    unused_qualifications,
    clippy::all,
    clippy::too_many_lines,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]

/// Device-plugin API, `v1beta1`.
pub mod v1beta1 {
    tonic::include_proto!("v1beta1");
}

/// Device-plugin API, `v1alpha1` and `v1alpha2`.
pub mod v1alpha {
    tonic::include_proto!("deviceplugin");
}

/// Pod-resources API, `v1`.
pub mod podresources_v1 {
    tonic::include_proto!("v1");
}

/// Pod-resources API, `v1alpha1`.
pub mod podresources_v1alpha1 {
    tonic::include_proto!("v1alpha1");
}

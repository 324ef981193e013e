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

/// DRA API, `v1`.
pub mod dra_v1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

/// DRA API, `v1beta1`.
pub mod dra_v1beta1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
}

/// Registration of plugins, `v1`.
pub mod pluginregistration {
    tonic::include_proto!("pluginregistration");
}

/// DRA health API, `v1`.
pub use self::podresources_v1 as dra_health_v1;

/// DRA health API, `v1alpha1`.
pub use self::podresources_v1alpha1 as dra_health_v1alpha1;

/// Pod-resources API, `v1`. The DRA health API has a package of the same name, so both are here.
pub mod podresources_v1 {
    tonic::include_proto!("v1");
}

/// Pod-resources API, `v1alpha1`, with the DRA health API as above.
pub mod podresources_v1alpha1 {
    tonic::include_proto!("v1alpha1");
}

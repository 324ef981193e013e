//! `v1alpha2` and `v1alpha1`: the API of kubelets 1.9 and 1.8.
//!
//! It has no options, no preferred allocation, no topology, no call before a container's start and
//! no CDI names. A resource that needs one of the last two is refused ([`ApiCapabilities`]),
//! because its container would lack something. The other three are features that such a kubelet
//! does not have.

use super::{
    ApiPackage, ListStream, Plugin, REQUEST_BYTES_MAX, RegisterRequest, ids, list_stream,
    on_one_line, with_timeout,
};
use crate::domain::{
    ApiCapabilities, ContainerEdits, DeviceId, EditDevice, EditMount, Offered, Offering,
};
use crate::kubelet::proto::v1alpha as api;
use crate::kubelet::proto::v1alpha::device_plugin_server::{DevicePlugin, DevicePluginServer};
use crate::kubelet::proto::v1alpha::registration_client::RegistrationClient;
use crate::kubelet::services::Services;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

const WIRE: ApiCapabilities =
    ApiCapabilities { api: "v1alpha", has_cdi: false, has_pre_start: false };

/// The package.
#[derive(Debug)]
pub struct V1Alpha;

#[tonic::async_trait]
impl ApiPackage for V1Alpha {
    fn versions(&self) -> &'static [&'static str] {
        &["v1alpha2", "v1alpha1"]
    }

    fn replaces_connection_on_register(&self) -> bool {
        true
    }

    fn keeps_annotations(&self) -> bool {
        false
    }

    async fn register(
        &self,
        channel: Channel,
        request: RegisterRequest,
        time: Duration,
    ) -> Result<(), Status> {
        let RegisterRequest { version, resource, endpoint, pre_start: _ } = request;
        let request = api::RegisterRequest {
            version: version.name().to_owned(),
            endpoint,
            resource_name: resource.to_string(),
        };
        RegistrationClient::new(channel).register(with_timeout(time, request)).await.map(drop)
    }

    fn serve(&self, plugin: Arc<dyn Plugin>, services: Services) -> Services {
        services.and(
            DevicePluginServer::new(Service(plugin)).max_decoding_message_size(REQUEST_BYTES_MAX),
        )
    }
}

pub(crate) struct Service(pub(crate) Arc<dyn Plugin>);

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = ListStream<api::ListAndWatchResponse>;

    async fn list_and_watch(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        Ok(Response::new(list_stream(self.0.as_ref(), list)?))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let answers = self
            .0
            .allocate(vec![ids(request.into_inner().devices_i_ds)], WIRE)
            .await
            .map_err(on_one_line)?;
        // A request is for one container, so there is one answer.
        Ok(Response::new(answers.into_iter().next().map(response).unwrap_or_default()))
    }
}

fn list(offering: &Offering) -> api::ListAndWatchResponse {
    let device = |(id, offered): (&DeviceId, &Offered)| api::Device {
        id: id.to_string(),
        health: offered.health.as_str().to_owned(),
    };
    api::ListAndWatchResponse { devices: offering.devices.iter().map(device).collect() }
}

fn response(edits: ContainerEdits) -> api::AllocateResponse {
    let mount = |mount: EditMount| api::Mount {
        container_path: mount.container,
        host_path: mount.host,
        read_only: mount.read_only,
    };
    let device = |device: EditDevice| api::DeviceSpec {
        container_path: device.container,
        host_path: device.host,
        permissions: device.permissions,
    };
    api::AllocateResponse {
        envs: edits.envs,
        mounts: edits.mounts.into_iter().map(mount).collect(),
        devices: edits.devices.into_iter().map(device).collect(),
        annotations: edits.annotations,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{hex, offering};
    use super::*;
    use crate::domain::AllocId;
    use crate::kubelet::proto::v1beta1;
    use prost::Message;
    use std::collections::BTreeMap;
    use tonic::server::NamedService;

    #[test]
    fn the_services_have_the_names_of_a_package_without_a_version() {
        assert_eq!(
            <DevicePluginServer<Service> as NamedService>::NAME,
            "deviceplugin.DevicePlugin"
        );
    }

    #[test]
    fn register_names_version_socket_and_resource() {
        let request = api::RegisterRequest {
            version: "v1alpha2".into(),
            endpoint: "x.sock".into(),
            resource_name: "a.b/c".into(),
        };
        // 1: "v1alpha2", 2: "x.sock", 3: "a.b/c"
        assert_eq!(
            hex(&request),
            "0a08 7631616c70686132 1206 782e736f636b 1a05 612e622f63".replace(' ', "")
        );
    }

    #[test]
    fn a_list_has_ids_and_health_and_nothing_else() {
        let list = list(&offering(&["gpu0", "gpu1"], &["gpu1"]));
        // 1: { 1: "gpu0", 2: "Healthy" }, 1: { 1: "gpu1", 2: "Unhealthy" }
        let wanted =
            "0a0f 0a0467707530 12074865616c746879 0a11 0a0467707531 1209556e6865616c746879";
        assert_eq!(hex(&list), wanted.replace(' ', ""));
    }

    #[test]
    fn a_request_is_one_containers_ids() {
        let bytes = b"\x0a\x04gpu0\x0a\x04gpu1";
        assert_eq!(
            api::AllocateRequest::decode(bytes.as_slice()).unwrap().devices_i_ds,
            ["gpu0", "gpu1"]
        );
    }

    #[test]
    fn an_answer_is_flat_and_what_the_kubelet_keeps_of_it_reads_as_v1beta1() {
        let edits = ContainerEdits {
            envs: BTreeMap::from([("A".into(), "1".into())]),
            mounts: vec![EditMount { host: "/h".into(), container: "/c".into(), read_only: true }],
            devices: vec![EditDevice {
                host: "/dev/h".into(),
                container: "/dev/c".into(),
                permissions: "rw".into(),
            }],
            annotations: BTreeMap::from([(AllocId::ANNOTATION.into(), "7".into())]),
            cdi_devices: Vec::new(),
        };
        let answer = response(edits.clone());
        // 1: { 1: "A", 2: "1" }, 2: { 1: "/c", 2: "/h", 3: true },
        // 3: { 1: "/dev/c", 2: "/dev/h", 3: "rw" }, 4: { 1: "holdfast.dev/alloc-id", 2: "7" }
        let wanted = "0a06 0a0141 120131 120a 0a022f63 12022f68 1801 1a14 0a062f6465762f63 12062f6465762f68 1a027277 \
                      221a 0a15686f6c64666173742e6465762f616c6c6f632d6964 120137";
        assert_eq!(hex(&answer), wanted.replace(' ', ""));
        // The checkpoint's reader decodes the stored answer of every kubelet as this one message.
        let stored =
            v1beta1::ContainerAllocateResponse::decode(answer.encode_to_vec().as_slice()).unwrap();
        assert_eq!(stored, super::super::v1beta1::response(edits));
    }
}

//! The service `DRAPlugin`, in v1 and v1beta1. The messages differ in one field: the share of a
//! device, which only v1 has.

use super::Claims;
use super::answers::{REQUEST_BYTES_MAX, answer};
use crate::domain::{ClaimRef, PreparedDevice};
use crate::kubelet::proto::{dra_v1, dra_v1beta1};
use crate::kubelet::services::Services;
use tonic::{Request, Response, Status};

/// The service of both versions.
#[derive(Debug, Clone)]
pub(crate) struct Plugin<C>(pub(crate) C);

/// Adds the service of every version.
pub(super) fn serve<C: Claims>(claims: &C, services: Services) -> Services {
    let v1 = dra_v1::dra_plugin_server::DraPluginServer::new(Plugin(claims.clone()));
    let v1beta1 = dra_v1beta1::dra_plugin_server::DraPluginServer::new(Plugin(claims.clone()));
    services
        .and(v1.max_decoding_message_size(REQUEST_BYTES_MAX))
        .and(v1beta1.max_decoding_message_size(REQUEST_BYTES_MAX))
}

/// The service in one package. The last argument is the field for the share, if there is one.
macro_rules! service {
    ($api:ident $(, $share_id:ident)?) => {
        impl From<$api::Claim> for ClaimRef {
            fn from($api::Claim { namespace, uid, name }: $api::Claim) -> Self {
                ClaimRef { uid, namespace, name }
            }
        }

        impl From<PreparedDevice> for $api::Device {
            fn from(device: PreparedDevice) -> Self {
                $api::Device {
                    request_names: vec![device.request],
                    pool_name: device.name.pool,
                    device_name: device.name.device,
                    cdi_device_ids: device.cdi_devices,
                    $($share_id: device.share_id,)?
                }
            }
        }

        #[tonic::async_trait]
        impl<C: Claims> $api::dra_plugin_server::DraPlugin for Plugin<C> {
            async fn node_prepare_resources(
                &self,
                request: Request<$api::NodePrepareResourcesRequest>,
            ) -> Result<Response<$api::NodePrepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(ClaimRef::from).collect();
                let answers = answer(claims, |claims| self.0.prepare(claims)).await?;
                let response = |result: Result<Vec<PreparedDevice>, String>| match result {
                    Ok(devices) => $api::NodePrepareResourceResponse {
                        devices: devices.into_iter().map($api::Device::from).collect(),
                        error: String::new(),
                    },
                    Err(error) => {
                        $api::NodePrepareResourceResponse { devices: Vec::new(), error }
                    }
                };
                let claims = answers.into_iter().map(|(uid, result)| (uid, response(result)));
                Ok(Response::new($api::NodePrepareResourcesResponse { claims: claims.collect() }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$api::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$api::NodeUnprepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(ClaimRef::from).collect();
                let answers = answer(claims, |claims| self.0.unprepare(claims)).await?;
                let response = |result: Result<(), String>| $api::NodeUnprepareResourceResponse {
                    error: result.err().unwrap_or_default(),
                };
                let claims = answers.into_iter().map(|(uid, result)| (uid, response(result)));
                Ok(Response::new($api::NodeUnprepareResourcesResponse { claims: claims.collect() }))
            }
        }
    };
}

service!(dra_v1, share_id);
service!(dra_v1beta1);

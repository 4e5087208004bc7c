module {
  func.func @main(%arg0: tensor<32x16xf32>, %arg1: tensor<32x16xf32>, %arg2: tensor<16xf32>, %arg3: tensor<16xf32>, %arg4: tensor<16xf32>, %arg5: tensor<16xf32>, %arg6: tensor<16x16xf32>, %arg7: tensor<16x16xf32>, %arg8: tensor<16x16xf32>, %arg9: tensor<16x16xf32>, %arg10: tensor<16xf32>, %arg11: tensor<16xf32>, %arg12: tensor<64x16xf32>, %arg13: tensor<16x64xf32>, %arg14: tensor<2x8xi64>, %arg15: tensor<2x8xi64>) -> tensor<f32> {
    %c = stablehlo.constant dense<0> : tensor<16xi64>
    %c_0 = stablehlo.constant dense<-100> : tensor<16xi64>
    %c_1 = stablehlo.constant dense<0> : tensor<8x8xi64>
    %c_2 = stablehlo.constant dense<0> : tensor<8xi64>
    %c_3 = stablehlo.constant dense<1> : tensor<8xi64>
    %c_4 = stablehlo.constant dense<8> : tensor<i64>
    %c_5 = stablehlo.constant dense<1> : tensor<i64>
    %c_6 = stablehlo.constant dense<0> : tensor<i64>
    %cst = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_8 = stablehlo.constant dense<1.000000e+00> : tensor<8x8xf32>
    %cst_9 = stablehlo.constant dense_resource<torch_tensor_8_4_torch.float32_1> : tensor<8x4xf32>
    %cst_10 = stablehlo.constant dense_resource<torch_tensor_8_4_torch.float32> : tensor<8x4xf32>
    %cst_11 = stablehlo.constant dense<0.000000e+00> : tensor<f64>
    %cst_12 = stablehlo.constant dense<0.000000e+00> : tensor<2x8x64xf32>
    %cst_13 = arith.constant dense<16> : tensor<1xi64>
    %cst_14 = arith.constant dense<1.000000e-05> : tensor<1xf64>
    %cst_15 = arith.constant dense<2.8284271247461903> : tensor<1xf64>
    %0 = "stablehlo.gather"(%arg0, %arg14) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, indices_are_sorted = false, slice_sizes = array<i64: 1, 16>}> : (tensor<32x16xf32>, tensor<2x8xi64>) -> tensor<2x8x16xf32>
    %1 = stablehlo.convert %0 : tensor<2x8x16xf32>
    %2 = stablehlo.convert %1 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %3 = stablehlo.reduce(%2 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %4 = stablehlo.reshape %3 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %5 = stablehlo.convert %cst_13 : (tensor<1xi64>) -> tensor<1xf64>
    %6 = stablehlo.reshape %5 : (tensor<1xf64>) -> tensor<f64>
    %7 = stablehlo.broadcast_in_dim %6, dims = [] : (tensor<f64>) -> tensor<2x8x1xf64>
    %8 = stablehlo.divide %4, %7 : tensor<2x8x1xf64>
    %9 = stablehlo.broadcast_in_dim %8, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %10 = stablehlo.subtract %2, %9 : tensor<2x8x16xf64>
    %11 = stablehlo.multiply %10, %10 : tensor<2x8x16xf64>
    %12 = stablehlo.reduce(%11 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %13 = stablehlo.reshape %12 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %14 = stablehlo.divide %13, %7 : tensor<2x8x1xf64>
    %15 = stablehlo.convert %14 : (tensor<2x8x1xf64>) -> tensor<2x8x1xf32>
    %16 = stablehlo.reduce(%1 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf32>, tensor<f32>) -> tensor<2x8xf32>
    %17 = stablehlo.reshape %16 : (tensor<2x8xf32>) -> tensor<2x8x1xf32>
    %18 = stablehlo.convert %cst_13 : (tensor<1xi64>) -> tensor<1xf32>
    %19 = stablehlo.reshape %18 : (tensor<1xf32>) -> tensor<f32>
    %20 = stablehlo.broadcast_in_dim %19, dims = [] : (tensor<f32>) -> tensor<2x8x1xf32>
    %21 = stablehlo.divide %17, %20 : tensor<2x8x1xf32>
    %22 = stablehlo.convert %cst_14 : (tensor<1xf64>) -> tensor<1xf32>
    %23 = stablehlo.reshape %22 : (tensor<1xf32>) -> tensor<f32>
    %24 = stablehlo.broadcast_in_dim %23, dims = [] : (tensor<f32>) -> tensor<2x8x1xf32>
    %25 = stablehlo.add %15, %24 : tensor<2x8x1xf32>
    %26 = stablehlo.rsqrt %25 : tensor<2x8x1xf32>
    %27 = stablehlo.broadcast_in_dim %21, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %28 = stablehlo.subtract %1, %27 : tensor<2x8x16xf32>
    %29 = stablehlo.broadcast_in_dim %26, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %30 = stablehlo.multiply %28, %29 : tensor<2x8x16xf32>
    %31 = stablehlo.broadcast_in_dim %arg4, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %32 = stablehlo.multiply %30, %31 : tensor<2x8x16xf32>
    %33 = stablehlo.broadcast_in_dim %arg5, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %34 = stablehlo.add %32, %33 : tensor<2x8x16xf32>
    %35 = stablehlo.transpose %arg6, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %36 = stablehlo.reshape %34 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %37 = stablehlo.dot_general %36, %35, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %38 = stablehlo.reshape %37 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %39 = stablehlo.reshape %38 : (tensor<2x8x16xf32>) -> tensor<2x8x2x8xf32>
    %40 = stablehlo.transpose %arg7, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %41 = stablehlo.dot_general %36, %40, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %42 = stablehlo.reshape %41 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %43 = stablehlo.reshape %42 : (tensor<2x8x16xf32>) -> tensor<2x8x2x8xf32>
    %44 = stablehlo.transpose %arg8, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %45 = stablehlo.dot_general %36, %44, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %46 = stablehlo.reshape %45 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %47 = stablehlo.reshape %46 : (tensor<2x8x16xf32>) -> tensor<2x8x2x8xf32>
    %48 = stablehlo.slice %39 [0:2, 0:8, 0:2, 0:4] : (tensor<2x8x2x8xf32>) -> tensor<2x8x2x4xf32>
    %49 = stablehlo.slice %39 [0:2, 0:8, 0:2, 4:8] : (tensor<2x8x2x8xf32>) -> tensor<2x8x2x4xf32>
    %50 = stablehlo.reshape %cst_10 : (tensor<8x4xf32>) -> tensor<1x8x4xf32>
    %51 = stablehlo.reshape %50 : (tensor<1x8x4xf32>) -> tensor<1x8x1x4xf32>
    %52 = stablehlo.reshape %cst_9 : (tensor<8x4xf32>) -> tensor<1x8x4xf32>
    %53 = stablehlo.reshape %52 : (tensor<1x8x4xf32>) -> tensor<1x8x1x4xf32>
    %54 = stablehlo.broadcast_in_dim %51, dims = [0, 1, 2, 3] : (tensor<1x8x1x4xf32>) -> tensor<2x8x2x4xf32>
    %55 = stablehlo.multiply %48, %54 : tensor<2x8x2x4xf32>
    %56 = stablehlo.broadcast_in_dim %53, dims = [0, 1, 2, 3] : (tensor<1x8x1x4xf32>) -> tensor<2x8x2x4xf32>
    %57 = stablehlo.multiply %49, %56 : tensor<2x8x2x4xf32>
    %58 = stablehlo.subtract %55, %57 : tensor<2x8x2x4xf32>
    %59 = stablehlo.multiply %49, %54 : tensor<2x8x2x4xf32>
    %60 = stablehlo.multiply %48, %56 : tensor<2x8x2x4xf32>
    %61 = stablehlo.add %59, %60 : tensor<2x8x2x4xf32>
    %62 = stablehlo.concatenate %58, %61, dim = 3 : (tensor<2x8x2x4xf32>, tensor<2x8x2x4xf32>) -> tensor<2x8x2x8xf32>
    %63 = stablehlo.slice %43 [0:2, 0:8, 0:2, 0:4] : (tensor<2x8x2x8xf32>) -> tensor<2x8x2x4xf32>
    %64 = stablehlo.slice %43 [0:2, 0:8, 0:2, 4:8] : (tensor<2x8x2x8xf32>) -> tensor<2x8x2x4xf32>
    %65 = stablehlo.multiply %63, %54 : tensor<2x8x2x4xf32>
    %66 = stablehlo.multiply %64, %56 : tensor<2x8x2x4xf32>
    %67 = stablehlo.subtract %65, %66 : tensor<2x8x2x4xf32>
    %68 = stablehlo.multiply %64, %54 : tensor<2x8x2x4xf32>
    %69 = stablehlo.multiply %63, %56 : tensor<2x8x2x4xf32>
    %70 = stablehlo.add %68, %69 : tensor<2x8x2x4xf32>
    %71 = stablehlo.concatenate %67, %70, dim = 3 : (tensor<2x8x2x4xf32>, tensor<2x8x2x4xf32>) -> tensor<2x8x2x8xf32>
    %72 = stablehlo.transpose %62, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xf32>) -> tensor<2x2x8x8xf32>
    %73 = stablehlo.transpose %71, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xf32>) -> tensor<2x2x8x8xf32>
    %74 = stablehlo.transpose %47, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xf32>) -> tensor<2x2x8x8xf32>
    %75 = stablehlo.transpose %73, dims = [0, 1, 3, 2] : (tensor<2x2x8x8xf32>) -> tensor<2x2x8x8xf32>
    %76 = stablehlo.reshape %72 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %77 = stablehlo.reshape %75 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %78 = stablehlo.broadcast_in_dim %77, dims = [0, 1, 2] : (tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %79 = stablehlo.dot_general %76, %78, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xf32>, tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %80 = stablehlo.reshape %79 : (tensor<4x8x8xf32>) -> tensor<2x2x8x8xf32>
    %81 = stablehlo.convert %cst_15 : (tensor<1xf64>) -> tensor<1xf32>
    %82 = stablehlo.reshape %81 : (tensor<1xf32>) -> tensor<f32>
    %83 = stablehlo.broadcast_in_dim %82, dims = [] : (tensor<f32>) -> tensor<2x2x8x8xf32>
    %84 = stablehlo.divide %80, %83 : tensor<2x2x8x8xf32>
    %85 = stablehlo.convert %c_5 : (tensor<i64>) -> tensor<f64>
    %86 = stablehlo.convert %c_4 : (tensor<i64>) -> tensor<f64>
    %87 = stablehlo.divide %86, %85 : tensor<f64>
    %88 = stablehlo.ceil %87 : tensor<f64>
    %89 = stablehlo.convert %88 : (tensor<f64>) -> tensor<i64>
    %90 = stablehlo.reshape %89 : (tensor<i64>) -> tensor<1xi64>
    %91 = stablehlo.dynamic_iota %90, dim = 0 : (tensor<1xi64>) -> tensor<8xi64>
    %92 = stablehlo.multiply %91, %c_3 : tensor<8xi64>
    %93 = stablehlo.add %92, %c_2 : tensor<8xi64>
    %94 = stablehlo.reshape %93 : (tensor<8xi64>) -> tensor<1x8xi64>
    %95 = stablehlo.reshape %93 : (tensor<8xi64>) -> tensor<8x1xi64>
    %96 = stablehlo.broadcast_in_dim %94, dims = [0, 1] : (tensor<1x8xi64>) -> tensor<8x8xi64>
    %97 = stablehlo.broadcast_in_dim %95, dims = [0, 1] : (tensor<8x1xi64>) -> tensor<8x8xi64>
    %98 = stablehlo.subtract %96, %97 : tensor<8x8xi64>
    %99 = stablehlo.compare LE, %98, %c_1, SIGNED : (tensor<8x8xi64>, tensor<8x8xi64>) -> tensor<8x8xi1>
    %100 = stablehlo.broadcast_in_dim %99, dims = [0, 1] : (tensor<8x8xi1>) -> tensor<8x8xi1>
    %101 = stablehlo.broadcast_in_dim %cst_8, dims = [0, 1] : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %102 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %103 = stablehlo.select %100, %101, %102 : tensor<8x8xi1>, tensor<8x8xf32>
    %104 = stablehlo.convert %c_6 : (tensor<i64>) -> tensor<f32>
    %105 = stablehlo.broadcast_in_dim %104, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %106 = stablehlo.compare EQ, %103, %105, FLOAT : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xi1>
    %107 = stablehlo.reshape %106 : (tensor<8x8xi1>) -> tensor<1x1x8x8xi1>
    %108 = stablehlo.broadcast_in_dim %107, dims = [0, 1, 2, 3] : (tensor<1x1x8x8xi1>) -> tensor<2x2x8x8xi1>
    %109 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<2x2x8x8xf32>
    %110 = stablehlo.broadcast_in_dim %84, dims = [0, 1, 2, 3] : (tensor<2x2x8x8xf32>) -> tensor<2x2x8x8xf32>
    %111 = stablehlo.select %108, %109, %110 : tensor<2x2x8x8xi1>, tensor<2x2x8x8xf32>
    %112 = stablehlo.reduce(%111 init: %cst) applies stablehlo.maximum across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %113 = stablehlo.reshape %112 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %114 = stablehlo.broadcast_in_dim %113, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %115 = stablehlo.subtract %111, %114 : tensor<2x2x8x8xf32>
    %116 = stablehlo.exponential %115 : tensor<2x2x8x8xf32>
    %117 = stablehlo.reduce(%116 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %118 = stablehlo.reshape %117 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %119 = stablehlo.broadcast_in_dim %118, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %120 = stablehlo.divide %116, %119 : tensor<2x2x8x8xf32>
    %121 = stablehlo.reshape %120 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %122 = stablehlo.reshape %74 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %123 = stablehlo.broadcast_in_dim %122, dims = [0, 1, 2] : (tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %124 = stablehlo.dot_general %121, %123, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xf32>, tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %125 = stablehlo.reshape %124 : (tensor<4x8x8xf32>) -> tensor<2x2x8x8xf32>
    %126 = stablehlo.transpose %125, dims = [0, 2, 1, 3] : (tensor<2x2x8x8xf32>) -> tensor<2x8x2x8xf32>
    %127 = stablehlo.reshape %126 : (tensor<2x8x2x8xf32>) -> tensor<2x8x16xf32>
    %128 = stablehlo.transpose %arg9, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %129 = stablehlo.reshape %127 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %130 = stablehlo.dot_general %129, %128, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %131 = stablehlo.reshape %130 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %132 = stablehlo.add %1, %131 : tensor<2x8x16xf32>
    %133 = stablehlo.convert %132 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %134 = stablehlo.reduce(%133 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %135 = stablehlo.reshape %134 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %136 = stablehlo.divide %135, %7 : tensor<2x8x1xf64>
    %137 = stablehlo.broadcast_in_dim %136, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %138 = stablehlo.subtract %133, %137 : tensor<2x8x16xf64>
    %139 = stablehlo.multiply %138, %138 : tensor<2x8x16xf64>
    %140 = stablehlo.reduce(%139 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %141 = stablehlo.reshape %140 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %142 = stablehlo.divide %141, %7 : tensor<2x8x1xf64>
    %143 = stablehlo.convert %142 : (tensor<2x8x1xf64>) -> tensor<2x8x1xf32>
    %144 = stablehlo.reduce(%132 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf32>, tensor<f32>) -> tensor<2x8xf32>
    %145 = stablehlo.reshape %144 : (tensor<2x8xf32>) -> tensor<2x8x1xf32>
    %146 = stablehlo.divide %145, %20 : tensor<2x8x1xf32>
    %147 = stablehlo.add %143, %24 : tensor<2x8x1xf32>
    %148 = stablehlo.rsqrt %147 : tensor<2x8x1xf32>
    %149 = stablehlo.broadcast_in_dim %146, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %150 = stablehlo.subtract %132, %149 : tensor<2x8x16xf32>
    %151 = stablehlo.broadcast_in_dim %148, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %152 = stablehlo.multiply %150, %151 : tensor<2x8x16xf32>
    %153 = stablehlo.broadcast_in_dim %arg10, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %154 = stablehlo.multiply %152, %153 : tensor<2x8x16xf32>
    %155 = stablehlo.broadcast_in_dim %arg11, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %156 = stablehlo.add %154, %155 : tensor<2x8x16xf32>
    %157 = stablehlo.transpose %arg12, dims = [1, 0] : (tensor<64x16xf32>) -> tensor<16x64xf32>
    %158 = stablehlo.reshape %156 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %159 = stablehlo.dot_general %158, %157, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x64xf32>) -> tensor<16x64xf32>
    %160 = stablehlo.reshape %159 : (tensor<16x64xf32>) -> tensor<2x8x64xf32>
    %161 = stablehlo.maximum %160, %cst_12 : tensor<2x8x64xf32>
    %162 = stablehlo.transpose %arg13, dims = [1, 0] : (tensor<16x64xf32>) -> tensor<64x16xf32>
    %163 = stablehlo.reshape %161 : (tensor<2x8x64xf32>) -> tensor<16x64xf32>
    %164 = stablehlo.dot_general %163, %162, contracting_dims = [1] x [0] : (tensor<16x64xf32>, tensor<64x16xf32>) -> tensor<16x16xf32>
    %165 = stablehlo.reshape %164 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %166 = stablehlo.add %132, %165 : tensor<2x8x16xf32>
    %167 = stablehlo.convert %166 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %168 = stablehlo.reduce(%167 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %169 = stablehlo.reshape %168 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %170 = stablehlo.divide %169, %7 : tensor<2x8x1xf64>
    %171 = stablehlo.broadcast_in_dim %170, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %172 = stablehlo.subtract %167, %171 : tensor<2x8x16xf64>
    %173 = stablehlo.multiply %172, %172 : tensor<2x8x16xf64>
    %174 = stablehlo.reduce(%173 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %175 = stablehlo.reshape %174 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %176 = stablehlo.divide %175, %7 : tensor<2x8x1xf64>
    %177 = stablehlo.convert %176 : (tensor<2x8x1xf64>) -> tensor<2x8x1xf32>
    %178 = stablehlo.reduce(%166 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf32>, tensor<f32>) -> tensor<2x8xf32>
    %179 = stablehlo.reshape %178 : (tensor<2x8xf32>) -> tensor<2x8x1xf32>
    %180 = stablehlo.divide %179, %20 : tensor<2x8x1xf32>
    %181 = stablehlo.add %177, %24 : tensor<2x8x1xf32>
    %182 = stablehlo.rsqrt %181 : tensor<2x8x1xf32>
    %183 = stablehlo.broadcast_in_dim %180, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %184 = stablehlo.subtract %166, %183 : tensor<2x8x16xf32>
    %185 = stablehlo.broadcast_in_dim %182, dims = [0, 1, 2] : (tensor<2x8x1xf32>) -> tensor<2x8x16xf32>
    %186 = stablehlo.multiply %184, %185 : tensor<2x8x16xf32>
    %187 = stablehlo.broadcast_in_dim %arg2, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %188 = stablehlo.multiply %186, %187 : tensor<2x8x16xf32>
    %189 = stablehlo.broadcast_in_dim %arg3, dims = [2] : (tensor<16xf32>) -> tensor<2x8x16xf32>
    %190 = stablehlo.add %188, %189 : tensor<2x8x16xf32>
    %191 = stablehlo.transpose %arg1, dims = [1, 0] : (tensor<32x16xf32>) -> tensor<16x32xf32>
    %192 = stablehlo.reshape %190 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %193 = stablehlo.dot_general %192, %191, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x32xf32>) -> tensor<16x32xf32>
    %194 = stablehlo.reshape %193 : (tensor<16x32xf32>) -> tensor<2x8x32xf32>
    %195 = stablehlo.reshape %194 : (tensor<2x8x32xf32>) -> tensor<16x32xf32>
    %196 = stablehlo.reshape %arg15 : (tensor<2x8xi64>) -> tensor<16xi64>
    %197 = stablehlo.reduce(%195 init: %cst) applies stablehlo.maximum across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %198 = stablehlo.reshape %197 : (tensor<16xf32>) -> tensor<16x1xf32>
    %199 = stablehlo.broadcast_in_dim %198, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %200 = stablehlo.subtract %195, %199 : tensor<16x32xf32>
    %201 = stablehlo.exponential %200 : tensor<16x32xf32>
    %202 = stablehlo.reduce(%201 init: %cst_7) applies stablehlo.add across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %203 = stablehlo.reshape %202 : (tensor<16xf32>) -> tensor<16x1xf32>
    %204 = stablehlo.log %203 : tensor<16x1xf32>
    %205 = stablehlo.broadcast_in_dim %204, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %206 = stablehlo.subtract %200, %205 : tensor<16x32xf32>
    %207 = stablehlo.compare NE, %196, %c_0, SIGNED : (tensor<16xi64>, tensor<16xi64>) -> tensor<16xi1>
    %208 = stablehlo.broadcast_in_dim %207, dims = [0] : (tensor<16xi1>) -> tensor<16xi1>
    %209 = stablehlo.broadcast_in_dim %196, dims = [0] : (tensor<16xi64>) -> tensor<16xi64>
    %210 = stablehlo.select %208, %209, %c : tensor<16xi1>, tensor<16xi64>
    %211 = stablehlo.reshape %210 : (tensor<16xi64>) -> tensor<16x1xi64>
    %212 = stablehlo.iota dim = 0 : tensor<16x1x1xi64>
    %213 = stablehlo.reshape %211 : (tensor<16x1xi64>) -> tensor<16x1x1xi64>
    %214 = stablehlo.concatenate %212, %213, dim = 2 : (tensor<16x1x1xi64>, tensor<16x1x1xi64>) -> tensor<16x1x2xi64>
    %215 = "stablehlo.gather"(%206, %214) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 2>, slice_sizes = array<i64: 1, 1>}> : (tensor<16x32xf32>, tensor<16x1x2xi64>) -> tensor<16x1xf32>
    %216 = stablehlo.reshape %215 : (tensor<16x1xf32>) -> tensor<16xf32>
    %217 = stablehlo.negate %216 : tensor<16xf32>
    %218 = stablehlo.broadcast_in_dim %217, dims = [0] : (tensor<16xf32>) -> tensor<16xf32>
    %219 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %220 = stablehlo.select %208, %218, %219 : tensor<16xi1>, tensor<16xf32>
    %221 = stablehlo.convert %207 : (tensor<16xi1>) -> tensor<16xi64>
    %222 = stablehlo.reduce(%221 init: %c_6) applies stablehlo.add across dimensions = [0] : (tensor<16xi64>, tensor<i64>) -> tensor<i64>
    %223 = stablehlo.convert %222 : (tensor<i64>) -> tensor<f32>
    %224 = stablehlo.reduce(%220 init: %cst_7) applies stablehlo.add across dimensions = [0] : (tensor<16xf32>, tensor<f32>) -> tensor<f32>
    %225 = stablehlo.divide %224, %223 : tensor<f32>
    return %225 : tensor<f32>
  }
}

{-#
  dialect_resources: {
    builtin: {
      torch_tensor_8_4_torch.float32_1: "0x0400000000000000000000000000000000000000A46A573F7775CC3D57D6233C6E12833AB7C7683FF96F4B3E3ED4A33C6912033BC381103E6D4E973E1FB9F53C939B443BCFBD41BFD861C73EDBCB233D5812833B107C75BF4477F53EF4B64C3DDED6A33B8C0F8FBE698C103FD19C753D599BC43B4630283F73EB243F323E8F3DC75FE53B",
      torch_tensor_8_4_torch.float32: "0x040000000000803F0000803F0000803F0000803F41510A3F98B87E3FB9FC7F3FF8FF7F3F3311D5BEA5E57A3FE5F27F3FDFFF7F3F26707DBFEF90743F83E27F3FB5FF7F3F305527BFA7CA6B3F94CB7F3F7AFF7F3F2C3C913E40A9603F19AE7F3F2EFF7F3FB8CD753F3249533F128A7F3FD2FE7F3FBDFF403FB3CC433F815F7F3F65FE7F3F"
    }
  }
#-}

